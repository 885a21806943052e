"""The pages of the reference: every public name once, and docstrings as lists of parameters, examples and links."""

import ast
import inspect
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
from docutils.core import publish_doctree
from sphinx.util.inventory import InventoryFile

import vitlens

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import reference  # noqa: E402

STUBS = sorted(
    path
    for package in ("vitlens", "vitlens_explorer", "vitlens_paper")
    for path in (ROOT / package).rglob("*.pyi")
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: reference.page(name) for name in reference.modules()}


def names_of_stub(path: Path) -> list[str]:
    """Full names in `__all__` of a stub."""
    module = ".".join(path.parent.relative_to(ROOT).parts)
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__":
            return [f"{module}.{name}" for name in ast.literal_eval(statement.value)]
    return []


def entries(pages: dict[str, str]) -> Counter:
    """Full names of all entries, with their numbers."""
    found = Counter()
    for page, text in pages.items():
        for kind, name in re.findall(r"^\.\. (auto\w+|py:data):: (\S+)$", text, re.M):
            found[f"{page}.{name}" if kind == "py:data" else name] += 1
    return found


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_pages_describe_every_name_of_a_stub_once(pages, stub):
    described = entries(pages)
    for name in names_of_stub(stub):
        if inspect.ismodule(sys.modules.get(name)):
            assert name in pages
        else:
            assert described[reference.places()[name]] == 1, name


def test_pages_describe_each_object_once(pages):
    described = entries(pages)
    assert set(described.values()) == {1}
    objects = Counter(id(reference.thing(name)) for name in described)
    assert set(objects.values()) == {1}
    for page, module in reference.modules().items():
        for name in dir(module):
            if name != "__version__" and not inspect.ismodule(getattr(module, name)):
                assert f"{page}.{name}" in reference.places()
    assert reference.places()["vitlens.recorder.capture"] == "vitlens.capture"


def test_resolve_finds_names_as_texts_have_them():
    for text, names, full in (
        ("vitlens.attention.rollout", (), "vitlens.attention.rollout"),
        ("attention.rollout(attn, query=(3, 4))", (), "vitlens.attention.rollout"),
        ("rollout", ("vitlens.attribution",), "vitlens.attribution.rollout"),
        ("models.load_model", (), "vitlens.load_model"),
        ("widgets.explore(model)", (), "vitlens_explorer.explore"),
        ("index", ("vitlens", "vitlens.TokenGrid"), "vitlens.TokenGrid.index"),
        ("help(vitlens.attribution)", (), "vitlens.attribution"),
        ("attn.differentiate(score)", (), "vitlens.recorder.Attention.differentiate"),
        ("attn", (), ""),
        ("images", ("vitlens.attribution",), ""),
        ("torch.nn.Module", (), ""),
        ("model(images)", (), ""),
    ):
        assert reference.resolve(text, *names) == full, text


def test_to_rst_lists_parameters_and_separates_errors():
    text = """A map (B, rows) of `images`, as in `rollout`.

    Of a_b and *c*. images: the input. query, layer: a `patch`, or
    e.g. a token. style "heat": colors. Raises ValueError for others, and TypeError.

    >>> 1 + 1
    2

    * One of `images`.
    * Two
      lines.

        code = "of a caller"

        more = code
    """
    written = reference.to_rst(text, "vitlens.attention", "", ("images", "query"))
    document = publish_doctree(
        written.replace(":py:obj:", ":title:"), settings_overrides={"report_level": 2}
    )
    kinds = [node.tagname for node in document]
    assert kinds == [
        *("paragraph", "paragraph", "definition_list", "paragraph"),
        *("literal_block", "bullet_list", "literal_block"),
    ]
    terms = [node.astext() for node in document[2].findall(lambda node: node.tagname == "term")]
    assert terms == ["images", "query, layer", 'style "heat"']
    assert document[1].astext() == "Of a_b and *c*."
    assert document[3].astext().startswith("Raises ValueError")
    assert ":py:obj:`rollout <vitlens.attention.rollout>`" in written
    assert "``images``" in written and ":py:obj:`TypeError <TypeError>`" in written
    assert document[6].astext() == 'code = "of a caller"\n\nmore = code'


def test_signature_has_types_and_defaults_as_in_the_source():
    assert reference.signature(vitlens.attention.received) == (
        "(attn: Attention, prefix: bool=False)",
        "Tensor",
    )
    assert reference.signature(vitlens.TokenGrid.index) == ("(row: int, col: int)", "int")
    parameters, _ = reference.signature(vitlens.train.Step)
    assert parameters.startswith("(step: int, ") and parameters.endswith(" = …)")
    assert reference.signature(vitlens.recorder.Attention) == ("", "")


def test_constant_without_docstring_is_an_error(monkeypatch):
    assert reference.constant("vitlens.attention.STATISTICS")[0] == "dict[str, Statistic]"
    monkeypatch.setattr(ast, "parse", lambda text: ast.Module([], []))
    with pytest.raises(ValueError, match="STATISTICS has no docstring below its assignment"):
        reference.constant("vitlens.attention.STATISTICS")


def test_source_link_names_the_lines_of_a_definition():
    address = "https://example.org/vitlens"
    for module, name in (
        ("vitlens", "capture"),
        ("vitlens", "TokenGrid.tokens"),
        ("vitlens.train", "Recipe.from_dict"),
        ("vitlens.scores", "real_labels"),
    ):
        link = reference.source_link(address, "py", {"module": module, "fullname": name})
        path, first, last = re.fullmatch(rf"{address}/blob/main/(.+)#L(\d+)-L(\d+)", link).groups()
        lines = (ROOT / path).read_text().splitlines()[int(first) - 1 : int(last)]
        assert any(f"def {name.rpartition('.')[2]}(" in line for line in lines), link
    constant = {"module": "vitlens.attention", "fullname": "STATISTICS"}
    assert reference.source_link(address, "py", constant) is None


@pytest.mark.parametrize("repository", ["", "https://example.org/vitlens"])
def test_entries_link_to_their_source_if_an_address_is_set(monkeypatch, repository):
    import website

    monkeypatch.setattr(website, "addresses", lambda: {"repository": repository, "site": ""})
    settings = runpy.run_path(str(ROOT / "docs/conf.py"))
    assert ("sphinx.ext.linkcode" in settings["extensions"]) == bool(repository)
    if repository:
        link = settings["linkcode_resolve"]("py", {"module": "vitlens", "fullname": "capture"})
        assert link.startswith(f"{repository}/blob/main/vitlens/recorder/record.py#L")


def test_inventory_of_python_has_the_types_and_errors_of_the_reference(pages):
    content = (ROOT / "docs/python.inv").read_bytes()
    inventory = InventoryFile.loads(content, uri="")
    known = {name for entries in inventory.data.values() for name in entries}
    short = {name.rpartition(".")[2] for name in known}
    errors = set(re.findall(r"<(\w+Error)>", "\n".join(pages.values())))
    assert errors <= known
    text = ""
    for name in reference.places():
        thing = reference.thing(name)
        if callable(thing):
            callables = [thing, *reference.members(thing).values()]
            signatures = [
                reference.signature(each) for each in callables if not isinstance(each, property)
            ]
            text += " ".join(" ".join(each) for each in signatures)
    for name in ("Path", "PathLike", "Callable", "Iterator", "Mapping", "bool", "slice"):
        assert name in short and re.search(rf"\b{name}\b", text)
