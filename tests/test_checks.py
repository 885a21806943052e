"""`python -m tests NAME`, and the workflows of GitHub, whose steps are such commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

import tests.__main__ as checks

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = checks.project()
VERSIONS = [
    line.removeprefix("Programming Language :: Python :: ")
    for line in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
]
ACTIONS = {
    "actions/checkout",
    "actions/setup-python",
    "actions/setup-node",
    "actions/upload-pages-artifact",
    "actions/deploy-pages",
}


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def jobs() -> list:
    found = []
    for path in WORKFLOWS:
        for name, job in workflow(path.name)["jobs"].items():
            found.append(pytest.param(job, id=f"{path.stem}-{name}"))
    return found


@pytest.fixture
def commands(monkeypatch):
    """The commands that a check would run, each as a list of words without the path of Python."""
    ran = []

    def record(command, **options):
        assert options["check"] and options["cwd"] == ROOT
        ran.append([Path(word).stem if word == sys.executable else word for word in command])

    monkeypatch.setattr(checks.subprocess, "run", record)
    monkeypatch.setattr(checks.os, "environ", dict(checks.os.environ))
    return ran


def test_main_lists_the_checks(capsys):
    assert checks.main([]) == 0
    listed = re.findall(r"^  python -m tests (\w+) ", capsys.readouterr().out, re.M)
    assert listed == list(checks.COMMANDS)
    assert checks.main(["everynight"]) == 2
    assert "everynight is not a check. Give one of these:" in capsys.readouterr().err


def test_main_returns_the_exit_code_of_a_failed_command(monkeypatch):
    monkeypatch.setattr(checks, "lint", None)
    monkeypatch.setitem(checks.COMMANDS, "lint", lambda words: checks.python("-c", "exit(7)"))
    assert checks.main(["lint"]) == 7


def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "tests", "floors"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == checks.oldest()


def test_everyday_passes_options_and_leaves_the_browser_out(commands):
    checks.main(["everyday", "--no-browser", "-k", "distance"])
    assert commands[0][1:3] == ["-m", "pytest"] and commands[0][-2:] == ["-k", "distance"]
    assert "--no-browser" not in commands[0]
    assert checks.os.environ["NO_BROWSER"] == "1"


def test_oldest_versions_are_the_floors_of_the_project(commands):
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["transformers"]
    pins = checks.oldest()
    assert [pin.split("==")[0] for pin in pins] == list(checks.FLOORS)
    assert {pin.replace("==", ">=") for pin in pins} <= set(requirements)
    checks.main(["install", "--oldest"])
    assert commands[0][1:] == ["-m", "pip", "install", *pins, "--editable", f".[{checks.EXTRAS}]"]


def test_install_takes_all_extras():
    assert set(checks.EXTRAS.split(",")) == set(PROJECT["optional-dependencies"])


def test_workflows_and_issue_forms_follow_their_schemas():
    """As `python -m tests workflows`, which also runs actionlint."""
    forms = (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    for name, files in (("github-workflows", WORKFLOWS), ("github-issue-forms", forms)):
        schema = get_builtin_schema(f"vendor.{name}")
        for file in files:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            if True in content:  # YAML reads the key `on` as true
                content["on"] = content.pop(True)
            errors = Draft7Validator(schema).iter_errors(content)
            assert not [f"{file.name}: {error.message}" for error in errors]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_ask_for_few_rights(path):
    assert workflow(path.name)["permissions"] == {"contents": "read"}
    assert workflow(path.name)["concurrency"]["cancel-in-progress"] is True


@pytest.mark.parametrize("job", jobs())
def test_jobs_use_known_actions_and_end(job):
    assert 0 < job["timeout-minutes"] <= 240
    for step in job["steps"]:
        if "uses" in step:
            action, _, version = step["uses"].partition("@")
            assert action in ACTIONS and re.fullmatch(r"v\d+", version), step["uses"]


def test_steps_of_the_tests_are_checks_of_this_folder(commands):
    """Each step runs in a clone as well, without a shell's own syntax."""
    steps = [
        step["run"]
        for job in workflow("tests.yml")["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) > 10
    for step in dict.fromkeys(steps):
        python, module, package, name, *arguments = shlex.split(step)
        assert [python, module, package] == ["python", "-m", "tests"], step
        if name not in ("workflows", "scripts"):  # they need npm; schemas are tested above
            assert checks.main([name, *arguments]) == 0, step
    assert {"install", "everyday", "slow", "lint", "types"} <= {step.split()[3] for step in steps}


def test_workflow_covers_the_systems_and_versions_that_the_project_names():
    tests = workflow("tests.yml")
    everyday = tests["jobs"]["everyday"]["strategy"]["matrix"]
    assert everyday["python"] == VERSIONS
    assert {name.split("-")[0] for name in everyday["os"]} == {"ubuntu", "windows", "macos"}
    for excluded in everyday["exclude"]:
        assert excluded["python"] in VERSIONS[1:-1] and excluded["os"] != "ubuntu-latest"
    (python,) = [
        step["with"]["python-version"]
        for step in tests["jobs"]["oldest"]["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    assert PROJECT["requires-python"] == f">={python}" and python == VERSIONS[0]
    assert tests[True]["schedule"]  # YAML reads the key `on` as true
