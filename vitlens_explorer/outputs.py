"""Outputs of a widget in a notebook: a still image, and the live view, which hides it."""

from __future__ import annotations

LIVE = "application/vnd.jupyter.widget-view+json"
"""Type of a live view in the output of a cell."""
STILL = '<style class="vitlens-still">{rules}</style>'
"""Beginning of the HTML of a still image. A notebook that is not trusted leaves it out, and shows the image."""
RULES = (
    ":root:has(.{name}) .{name}-still {{display: none}}"
    ":root:has(.{name}) .jp-OutputArea-child:has(.{name}-still) {{display: none}}"
    ".jp-OutputArea-child:has(.{name}-still) + "
    ".jp-OutputArea-child:not(:has(.jp-OutputArea-output *)) {{display: none}}"
)
"""The image is hidden while the view is in the document. Below the image, JupyterLab's error about a view without its
kernel is hidden. It is a text alone, while a view, and its other errors, are elements."""


def display_widget(widget, still: dict[str, str]) -> None:
    """Display a widget in IPython as two outputs: its still image, given as a `bundle`, and its live view.

    In one output, JupyterLab would show an error in place of the image after the kernel has ended.
    """
    from IPython.display import display

    name = f"vitlens-{widget.model_id}"
    widget.add_class(name)
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    display(hidden_by(name, still), raw=True)
    display({LIVE: view}, raw=True)


def hidden_by(name: str, still: dict[str, str]) -> dict[str, str]:
    """A still image, given as a `bundle`, that is hidden while an element of the class `name` is in the document."""
    rules = STILL.format(rules=RULES.format(name=name))
    image = f'{rules}<div class="{name}-still">{still["text/html"]}</div>'
    return still | {"text/html": image}
