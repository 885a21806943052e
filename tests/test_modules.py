"""The ES modules of the pages: their imports, exports and layers, and the scripts that Python joins from them."""

import re
from pathlib import Path

import pytest

import vitlens_explorer
from vitlens.plot.scales import ATTENTION, UNIFORM
from vitlens_explorer import front, in_page, live
from vitlens_explorer.audit_page import AUDIT_PAGE

ROOT = Path(vitlens_explorer.__file__).parent
LAYERS = {"front": 0, "in_page": 1, "live": 2}
"""Folders of modules. A module imports from its own folder and from those before it."""
MODULES = sorted(ROOT.glob("*/*.js"))
ENTRIES = {
    "notebook": front.FRONT / "index.js",
    "saved page": in_page.IN_PAGE / "saved.js",
    "live page": live.LIVE / "opening.js",
    "worker": live.LIVE / "worker.js",
    "audit": AUDIT_PAGE / "audit.js",
}
NAMED_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.MULTILINE)
DECLARED = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def imports_of(module: Path) -> list[tuple[Path, set[str]]]:
    """(module, names) of each import of a module from another one."""
    found = NAMED_IMPORT.findall(module.read_text(encoding="utf-8"))
    return [
        ((module.parent / source).resolve(), set(re.findall(r"\w+", names)))
        for names, source in found
    ]


def exports_of(module: Path) -> set[str]:
    return set(EXPORTED.findall(module.read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_imported_names_are_exported(module):
    for imported, names in imports_of(module):
        assert names <= exports_of(imported), imported.name


def test_exported_names_are_imported():
    """A name that no other module imports needs no export."""
    used: dict[Path, set[str]] = {}
    for module in MODULES:
        for imported, names in imports_of(module):
            used.setdefault(imported, set()).update(names)
    for module in MODULES:
        assert exports_of(module) <= used.get(module.resolve(), set()), module.name


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_folders_import_from_those_before(module):
    folder = module.parent.name
    for imported, _ in imports_of(module):
        other = imported.parent.name
        allowed = {folder, "front"} | {
            name for name in LAYERS if LAYERS[name] <= LAYERS.get(folder, 0)
        }
        assert other in allowed, imported.name


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_joined_scripts_declare_each_name_once(entry):
    script = front.join_modules(entry)
    names = DECLARED.findall(script)
    assert len(names) > 20
    assert sorted(names) == sorted(set(names))
    assert not re.search(r"^(import|export (?!default))", script, re.MULTILINE)


def test_modules_stand_once_and_after_their_imports(tmp_path):
    imports = {"a": "bc", "b": "d", "c": "d", "d": ""}
    for name, others in imports.items():
        lines = [f'import {{ {other} }} from "./{other}.js";\n' for other in others]
        (tmp_path / f"{name}.js").write_text("".join(lines) + f"\nexport const {name} = 1;\n")
    script = front.join_modules(tmp_path / "a.js")
    assert DECLARED.findall(script) == ["d", "b", "c", "a"]


def test_modules_that_import_each_other_are_refused(tmp_path):
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\n\nexport const a = 1;\n')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";\n\nexport const b = 1;\n')
    with pytest.raises(ValueError, match=r"must not import each other, got a\.js → b\.js → a\.js"):
        front.join_modules(tmp_path / "a.js")


def test_json_files_become_constants(tmp_path):
    (tmp_path / "known.json").write_text('{"a": [1, "é"]}', encoding="utf-8")
    (tmp_path / "a.js").write_text(
        'import KNOWN from "./known.json" with { type: "json" };\n\nexport const a = KNOWN.a;\n'
    )
    assert front.join_modules(tmp_path / "a.js") == (
        'const KNOWN = {"a":[1,"\\u00e9"]};\n\nconst a = KNOWN.a;\n'
    )


def test_lines_of_comments_are_left_out():
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        for template in re.findall(r"`[^`]*`", front.COMMENT.sub("", text)):
            assert template in text, "a line of a template was taken for a comment"
    script = front.join_modules(ENTRIES["saved page"])
    assert not re.search(r"^ *//", script, re.MULTILINE)
    assert 'setAttribute("viewBox"' in script


def test_bounds_of_uniform_maps_are_those_of_python():
    text = (front.FRONT / "scales.js").read_text(encoding="utf-8")
    values = {name: float(value) for name, value in re.findall(r"(\w+): ([\d.]+)", text)}
    assert values == {"map": UNIFORM, "attention": ATTENTION, "similarity": 0, "norms": 0}
