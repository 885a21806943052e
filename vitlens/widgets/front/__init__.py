"""The front end's files: one script and one style sheet for the notebook, the app and pages."""

from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("elements", "controls", "pictures", "charts", "source", "page")
"""Names of the scripts in the order in which they are joined. They share one scope."""


def script() -> str:
    """The scripts as one JavaScript module, whose default export has anywidget's `render`."""
    return "\n".join((HERE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)


def style() -> str:
    """The style sheet."""
    return (HERE / "front.css").read_text(encoding="utf-8")
