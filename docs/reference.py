"""The reference: pages with the public names of each module, for the site, and links to them from all other pages.

Sphinx loads this file as an extension. Names come from `__all__`, texts from docstrings, which are prose: paragraphs,
lists, examples, and sentences that begin with "name: " and describe a parameter. napoleon reads none of these, so
`to_rst` turns them into lists of parameters, code and links.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from docutils import nodes
from sphinx.ext import intersphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["vitlens", "vitlens_explorer", "vitlens_paper", "vitlens_paper.evaluate"]
SHORT = {
    "widgets": "vitlens_explorer",
    "paper": "vitlens_paper",
    "attn": "vitlens.recorder.Attention",
}
"""Full names of packages and of a class by the names that the book and the docs give to them or to an object."""


# Public names.


@lru_cache
def modules() -> dict[str, ModuleType]:
    """Modules of the reference by name: the packages, each followed by the modules in its `__all__`."""
    found = {}

    def add(name: str) -> None:
        module = importlib.import_module(name)
        found[name] = module
        for child in sorted(module.__all__):
            if isinstance(getattr(module, child), ModuleType):
                add(f"{name}.{child}")

    for name in PACKAGES:
        add(name)
    return found


@lru_cache
def places() -> dict[str, str]:
    """The name under which the reference describes each public name: the shortest name of the same object.

    >>> places()["vitlens.recorder.capture"]
    'vitlens.capture'
    """
    names = []
    for module_name, module in modules().items():
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType):
                names.append(f"{module_name}.{name}")
    described = {}
    for name in sorted(names, key=lambda name: (name.count("."), names.index(name))):
        described.setdefault(id(thing(name)), name)
    return {name: described[id(thing(name))] for name in names}


def thing(name: str) -> object:
    """The object with a full public name."""
    module, _, attribute = name.rpartition(".")
    return getattr(modules()[module], attribute)


def resolve(text: str, module: str = "", owner: str = "") -> str:
    """Full name in the reference for a name in a text, or "" if there is none.

    text: a name as a docstring or a page has it, perhaps with a call: `rollout`, `attention.rollout(attn)`. Names of
    modules need a dot. module, owner: the module and the class of the docstring.

    >>> resolve("attention.rollout(attn)"), resolve("rollout", "vitlens.attribution")
    ('vitlens.attention.rollout', 'vitlens.attribution.rollout')
    """
    text = re.sub(r"^help\((.+)\)$", r"\1", text)
    match = re.match(r"([A-Za-z_][\w.]*\w)(?:\(.*\))?$", text, re.S)
    if not match:
        return ""
    first, dot, rest = match[1].partition(".")
    name = (SHORT.get(first, first) if dot else first) + dot + rest
    for scope in (owner, module, module.split(".")[0], "vitlens", ""):
        full = f"{scope}.{name}" if scope else name
        if full in modules() and dot:
            return full
        if full in places():
            return places()[full]
        parent, _, member = full.rpartition(".")
        if parent in places() and member in members(thing(parent)):
            return f"{places()[parent]}.{member}"
    return ""


def members(thing: object) -> dict[str, object]:
    """Public methods and properties of a class with a docstring, by name."""
    if not inspect.isclass(thing):
        return {}
    return {
        name: value
        for name, value in vars(thing).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, property | classmethod | staticmethod))
        and inspect.getdoc(value)
    }


# Docstrings.


PARAMETER = re.compile(
    r'(?:(?<=\A)|(?<=[.…)”"`?] ))((?:\*{0,2}[a-z_]\w*(?: "\w+")?)(?:, \*{0,2}[a-z_]\w*)*): '
)
"""The name or names at the beginning of a sentence that describes parameters or fields."""


def to_rst(docstring: str, module: str, owner: str = "", parameters: tuple[str, ...] = ()) -> str:
    """A docstring as reStructuredText.

    module, owner: as in `resolve`. parameters: names that are no links in this docstring.
    """
    parts: list[str] = []
    for part in re.split(r"\n{2,}", inspect.cleandoc(docstring)):
        if parts and is_code(part) and is_code(parts[-1]):
            parts[-1] += f"\n\n{part}"
        else:
            parts.append(part)
    blocks = []
    for block in parts:
        lines = block.splitlines()
        if lines[0].startswith(">>>"):
            blocks.append(code("pycon", block))
        elif is_code(block):
            text = textwrap.dedent(block)
            blocks.append(code(language(text), text))
        elif lines[0].startswith("* "):
            items = re.split(r"^\* ", block, flags=re.M)[1:]
            texts = [prose(" ".join(item.split()), module, owner, parameters) for item in items]
            blocks.append("\n".join(f"* {text}" for text in texts))
        elif any(re.search(r"\S {3,}\S", line) for line in lines):  # a table
            blocks.append(code("text", block))
        else:
            blocks += paragraphs(" ".join(block.split()), module, owner, parameters)
    return "\n\n".join(blocks)


def is_code(block: str) -> bool:
    """True for an indented block."""
    return all(line.startswith("    ") or not line for line in block.splitlines())


def code(language: str, text: str) -> str:
    return f".. code-block:: {language}\n\n{textwrap.indent(text, '   ')}"


def language(text: str) -> str:
    """Language of an indented block."""
    if text.startswith(">>>"):
        return "pycon"
    if text.startswith("["):
        return "toml"
    return "text" if "…" in text else "python"


def paragraphs(text: str, *names) -> list[str]:
    """A paragraph as prose, a list of the parameters that it describes, and its sentence on errors."""
    text, _, errors = re.sub(r"(?:^|(?<=[.)…”`] ))Raises ", "\0Raises ", text, count=1).partition(
        "\0"
    )
    before, *described = PARAMETER.split(text)
    blocks = [prose(before.strip(), *names)] if before.strip() else []
    if described:
        items = [".. rst-class:: parameters\n"]
        for name, meaning in zip(described[::2], described[1::2], strict=True):
            items.append(f"``{name}``\n   {prose(meaning.strip(), *names)}")
        blocks.append("\n".join(items))
    if errors:
        linked = re.sub(r"(?<![\w`.])([A-Z]\w*Error)\b", r"`\1`", errors)
        blocks.append(prose(linked, *names))
    return blocks


def prose(text: str, module: str, owner: str = "", parameters: tuple[str, ...] = ()) -> str:
    """A text with names in backticks as reStructuredText: names of the reference and of Python become links."""
    parts = re.split(r"`([^`]+)`", text)
    for number, part in enumerate(parts):
        if number % 2 == 0:
            parts[number] = re.sub(r"([\\*_|`(])", r"\\\1", part)
            continue
        target = "" if part in parameters else resolve(part, module, owner)
        if not target and part.endswith("Error"):
            target = part
        parts[number] = f":py:obj:`{part} <{target}>`" if target else f"``{part}``"
        # a role must end before a letter: `Explained`s
        if parts[number + 1][:1].isalnum():
            parts[number] += "\\ "
    return "".join(parts)


# Signatures, as in the source.


def signature(thing: object) -> tuple[str, str]:
    """Parameters and result of a callable with types, as texts."""
    thing = inspect.unwrap(thing.__func__ if isinstance(thing, classmethod) else thing)
    if inspect.isclass(thing):
        has_fields = is_dataclass(thing) or hasattr(thing, "_fields")
        return class_parameters(thing) if has_fields else "", ""
    function = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    arguments = function.args
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    return f"({ast.unparse(arguments)})", ast.unparse(function.returns) if function.returns else ""


def class_parameters(kind: type) -> str:
    """Parameters of a class with types. A default that is made for each object is "…"."""
    texts = []
    keywords = False
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            texts.append("*")
            keywords = True
        annotation, default = parameter.annotation, parameter.default
        text = parameter.name
        if annotation is not parameter.empty:
            if not isinstance(annotation, str):
                annotation = inspect.formatannotation(annotation)
            text += f": {re.sub(r'[a-z_.]+[.](?=[A-Z])', '', annotation)}"
        if default is not parameter.empty:
            shown = "…" if repr(default).startswith("<") else repr(default)
            text += f" = {shown}"
        texts.append(text)
    return f"({', '.join(texts)})"


# Pages.


def contents() -> str:
    """Markdown that follows docs/reference.md on the site: each module with its names."""
    lines = ["```{eval-rst}"]
    for name, module in modules().items():
        lines.append(f":py:mod:`{name}`\n   {prose(summary(module.__doc__), name)}\n")
        own = [f":py:obj:`{full.rpartition('.')[2]} <{full}>`" for full in described_in(name)]
        lines.append(f"   {', '.join(own)}\n")
    lines.append(".. toctree::\n   :hidden:\n")
    lines += [f"   /reference/{name}" for name in modules()]
    return "\n".join([*lines, "```", ""])


def described_in(module: str) -> list[str]:
    """Full names that the page of a module describes: classes and functions, then constants."""
    own = [place for name, place in places().items() if name == place]
    own = [name for name in own if name.rpartition(".")[0] == module]
    return sorted(own, key=lambda name: (not callable(thing(name)), name.lower()))


def summary(docstring: str) -> str:
    """First paragraph of a docstring."""
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())


def page(name: str) -> str:
    """reStructuredText of the page of a module."""
    module = modules()[name]
    parts = [f"{name}\n{'=' * len(name)}", f".. py:module:: {name}", to_rst(module.__doc__, name)]
    rows = []
    for full in described_in(name):
        short = full.rpartition(".")[2]
        rows.append(f"   * - :py:obj:`{short} <{full}>`\n     - {prose(first_line(full), name)}")
    for full, place in places().items():
        if full.rpartition(".")[0] == name and full != place:
            short = full.rpartition(".")[2]
            rows.append(f"   * - :py:obj:`{short} <{place}>`\n     - As :py:obj:`{place}`")
    for child in modules():
        if child.rpartition(".")[0] == name and child.rpartition(".")[2] in module.__all__:
            text = prose(summary(modules()[child].__doc__), child)
            rows.append(f"   * - :py:mod:`{child.rpartition('.')[2]} <{child}>`\n     - {text}")
    parts.append("\n".join([".. list-table::\n   :class: names\n", *rows]))
    for full in described_in(name):
        parts.append(entry(full, name))
    return "\n\n".join([*parts, ""])


def first_line(full: str) -> str:
    """First paragraph of the docstring of a name."""
    if callable(thing(full)):
        return summary(thing(full).__doc__)
    return summary(constant(full)[1])


def entry(full: str, module: str) -> str:
    """The directive that describes a name."""
    kind = thing(full)
    if not callable(kind):
        annotation, text = constant(full)
        lines = [f".. py:data:: {full.rpartition('.')[2]}"]
        if annotation:
            lines.append(f"   :type: {annotation}")
        lines += ["", textwrap.indent(to_rst(text, module), "   ")]
        if isinstance(kind, dict) and all(isinstance(key, str) for key in kind):
            keys = ", ".join(f"``{key}``" for key in kind)
            lines += ["", f"   Keys: {keys}."]
        return "\n".join(lines)
    if inspect.isclass(kind):
        directive = "autoexception" if issubclass(kind, BaseException) else "autoclass"
        names = ", ".join(members(kind))
        return (
            f".. {directive}:: {full}\n   :members: {names}"
            if names
            else f".. {directive}:: {full}"
        )
    return f".. autofunction:: {full}"


def constant(full: str) -> tuple[str, str]:
    """Type and docstring of a constant, from the file that assigns it."""
    value, name = thing(full), full.rpartition(".")[2]
    for module in [*sys.modules.values()]:
        if not getattr(module, "__name__", "").startswith("vitlens"):
            continue
        if vars(module).get(name) is not value:
            continue
        body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
        for statement, following in zip(body, body[1:], strict=False):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            if getattr(targets[0], "id", "") != name:
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                annotation = getattr(statement, "annotation", None)
                return ast.unparse(annotation) if annotation else "", following.value.value
    raise ValueError(f"{full} has no docstring below its assignment. Write one.")


def write(folder: Path) -> None:
    """Write the pages into a folder."""
    folder.mkdir()
    for name in modules():
        (folder / f"{name}.rst").write_text(page(name), encoding="utf-8")


# What Sphinx calls.


def owner_of(name: str) -> tuple[str, str]:
    """Module and class of the full name of an entry, the class "" for functions."""
    parent = name.rpartition(".")[0]
    if parent in modules():
        return parent, name if inspect.isclass(thing(name)) else ""
    return parent.rpartition(".")[0], parent


def process_docstring(app, what, name, described, options, lines) -> None:
    """Replace the lines of a docstring by reStructuredText."""
    module, owner = owner_of(name)
    parameters = ()
    if what in ("function", "method"):
        found = re.findall(r"\b(\w+)(?=[:=,)])", signature(described)[0])
        parameters = tuple(found)
    lines[:] = to_rst("\n".join(lines), module, owner, parameters).splitlines()


def process_signature(app, what, name, described, options, arguments, result):
    """The signature as in the source, None where it stays as it is."""
    if what in ("property", "exception"):
        return None
    return signature(described)


@lru_cache
def python_names() -> dict[str, str]:
    """Full names of Python by the names that annotations have, from the stored inventory."""
    lines = (Path(__file__).parent / "python.inv").read_text(encoding="utf-8").splitlines()[3:]
    names = [line.split()[0] for line in lines]
    return {short: name for name in names for short in (name, name.rpartition(".")[2])}


def missing_reference(app, env, node, contnode):
    """A link for the name of a type as annotations have it: of a class in the reference, or of Python."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    short = target.rpartition(".")[2]
    for place in places().values():
        if place.rpartition(".")[2] == short and not inspect.isroutine(thing(place)):
            document = f"reference/{place.rpartition('.')[0]}"
            return make_refnode(app.builder, node["refdoc"], document, place, contnode, place)
    if target in python_names():
        node["reftarget"] = python_names()[target]
        return intersphinx.missing_reference(app, env, node, contnode)
    return None


class LinkNames(SphinxPostTransform):
    """Links from names in code style on pages of the book and the docs, once in each section."""

    default_priority = 5
    formats = ("html",)

    def run(self, **options) -> None:
        here = self.env.docname
        if here.startswith("reference/"):
            return
        linked = set()
        for literal in [*self.document.findall(nodes.literal)]:
            target = resolve(literal.astext())
            if not target or not may_link(literal.astext()) or has_link(literal):
                continue
            section = literal
            while not isinstance(section, nodes.section | nodes.document):
                section = section.parent
            if (id(section), target) in linked:
                continue
            linked.add((id(section), target))
            document, anchor = address(target)
            link = make_refnode(
                self.app.builder, here, document, anchor, literal.deepcopy(), target
            )
            literal.replace_self(link)


def may_link(text: str) -> bool:
    """True for names with a dot, a capital, an underscore or a call, which are not common words, and main functions."""
    return bool(re.search(r"[._(A-Z]", text)) or text in ("capture", "intervene", "preprocess")


def has_link(node: nodes.Node) -> bool:
    """True for a node inside a link or a heading."""
    while node is not None:
        if isinstance(node, nodes.reference | nodes.title):
            return True
        node = node.parent
    return False


def address(full: str) -> tuple[str, str]:
    """Page and anchor of a full name of the reference."""
    if full in modules():
        return f"reference/{full}", f"module-{full}"
    module, _ = owner_of(full)
    return f"reference/{module}", full


def source_link(repository: str, domain: str, info: dict) -> str | None:
    """Address of the lines that define a name, for `sphinx.ext.linkcode`. None for constants."""
    found = modules()[info["module"]]
    for part in info["fullname"].split("."):
        found = (
            inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        )
    found = getattr(found, "fget", getattr(found, "__func__", found))
    found = inspect.unwrap(found)
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return None
    path = Path(inspect.getsourcefile(found)).resolve().relative_to(ROOT).as_posix()
    lines, first = inspect.getsourcelines(found)
    return f"{repository}/blob/main/{path}#L{first}-L{first + len(lines) - 1}"


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("missing-reference", missing_reference, priority=100)
    app.add_post_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
