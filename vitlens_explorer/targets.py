"""The targets of the explorer: a class, or the similarity to a text or a photograph, and their controls.

In the state of the explorer, `target` is PREDICTED, a class number, (PICTURE, name of a photograph) or (TEXT, prompt),
`against` NO_OTHER or a class number, and `typed` are the classes and texts that were typed, the latest first.
"""

from __future__ import annotations

import re

from torch import nn

from vitlens.attribution.target import classes
from vitlens_explorer.controls import Control
from vitlens_explorer.page import Change
from vitlens_explorer.photographs import Forward
from vitlens_explorer.views import Likeness, View
from vitlens_explorer.words import say

PREDICTED, NO_OTHER, PICTURE, TEXT = "predicted", "none", "picture", "text"
TYPED = 10
"""Largest number of typed classes and texts in the menus."""


def change_of_targets(
    model: nn.Module, forward: Forward, state: dict, values: dict, reads_text: bool
) -> Change:
    """Values of controls in which classes are numbers, and typed classes and texts are options.

    values: `target`, `against` and `another` take a class number or name, `another` also a text if the model has a text
    tower (`reads_text`). Raises ValueError for unknown classes.
    """
    values = dict(values)
    others = {}
    another = values.get("another")
    if isinstance(another, str) and another.strip():
        prompt = another.strip()
        values["target"] = (TEXT, prompt) if reads_text else prompt
    if "target" in values and "another" not in values:
        others["another"] = ""
    typed = []
    for name, nothing in (("target", PREDICTED), ("against", NO_OTHER)):
        value = values.get(name, nothing)
        if value in (None, nothing):
            if name in values:
                values[name] = nothing
        elif isinstance(value, list | tuple):  # the browser sends lists
            values[name] = tuple(value)
            if value[0] == TEXT:
                typed.append(values[name])
        else:
            values[name] = class_number(model, forward, value)
            typed.append(values[name])
    if any(isinstance(value, tuple) for value in typed) and not reads_text:
        raise ValueError(f"{forward.name} has no text tower, so a text cannot be its target.")
    known = (*forward.likeliest, *state["typed"])
    new = [value for value in typed if value not in known]
    others["typed"] = (*new, *state["typed"])[:TYPED]
    return Change(values, others)


def class_number(model: nn.Module, forward: Forward, value: int | str) -> int:
    """The number of a class by its number or name, or of the likeliest class whose name has these whole words."""
    if not forward.likeliest:
        raise ValueError(
            f"{forward.name} has no classifier head for images, so no class {value!r}."
        )
    try:
        return classes(model, forward.logits[None], value).item()
    except ValueError:
        wanted = whole_words(str(value))
        matches = [
            number for number, name in enumerate(forward.names or ()) if wanted <= whole_words(name)
        ]
        if not wanted or not matches:
            raise
        return max(matches, key=forward.share)


def whole_words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def fit_targets(state: dict, forward: Forward) -> dict:
    """Target and contrast of a state that a forward has."""
    target, against = state["target"], state["against"]
    others = [(PICTURE, name) for name in state["photographs"] if name != state["photograph"]]
    picture_gone = isinstance(target, tuple) and target[0] == PICTURE and target not in others
    if picture_gone or (target == PREDICTED and not forward.likeliest):
        target = others[0] if others and not forward.likeliest else PREDICTED
    explained = target
    if target == PREDICTED and forward.likeliest:
        explained = forward.likeliest[0]
    if against == explained:
        against = NO_OTHER
    return {"target": target, "against": against}


def explained_target(state: dict, forward: Forward, view: View) -> int | Likeness:
    """The class that a view explains, or the similarity."""
    target = state["target"]
    if target == PREDICTED or (isinstance(target, tuple) and not view.attributes):
        return forward.likeliest[0]
    if not isinstance(target, tuple):
        return target
    kind, name = target
    if kind == TEXT:
        return Likeness(name)
    photograph = state["photographs"][name]
    return Likeness(name, photograph.number, photograph.image)


def target_controls(state: dict, forward: Forward, view: View, reads_text: bool) -> list[Control]:
    target = state["target"]
    if isinstance(target, tuple) and not view.attributes and view.explains:
        target = PREDICTED
    typed = (*state["typed"], state["target"], state["against"])
    numbers = [value for value in typed if isinstance(value, int)]
    named = [
        (_class_words(forward, number), number)
        for number in dict.fromkeys([*forward.likeliest, *numbers])
    ]
    options: list[tuple[str, object]] = []
    groups: list[tuple[str, int]] = []

    def offer(group: str, choices: list[tuple[str, object]]) -> None:
        if choices:
            options.extend(choices)
            groups.append((say(group), len(choices)))

    if forward.likeliest:
        offer("a class", [(say("predicted"), PREDICTED), *named])
    if view.attributes or not view.explains:
        prompts = [value for value in typed if isinstance(value, tuple) and value[0] == TEXT]
        texts = [(say("like a text", name=text[1]), text) for text in dict.fromkeys(prompts)]
        offer("to a text", texts)
        others = [name for name in state["photographs"] if name != state["photograph"]]
        offer("to an image", [(say("like an image", name=n), (PICTURE, n)) for n in others])
    explained = target
    if target == PREDICTED and forward.likeliest:
        explained = forward.likeliest[0]
    contrasts = [(say("nothing"), NO_OTHER)]
    contrasts += [(name, number) for name, number in named if number != explained]
    controls = [
        Control(
            "target",
            "Explain",
            "select",
            target,
            tuple(options),
            tuple(groups),
            hidden=not view.explains,
        )
    ]
    if reads_text or forward.likeliest:
        controls.append(_another(state["another"], reads_text, hidden=not view.explains))
    alone = not view.contrasts or isinstance(target, tuple)
    controls.append(
        Control(
            "against",
            "Contrast with",
            "select",
            state["against"],
            tuple(contrasts),
            hidden=not view.explains or alone,
        )
    )
    return controls


def _another(text: str, reads_text: bool, hidden: bool) -> Control:
    label, hint = "Any class", "class name or number"
    if reads_text:
        label, hint = "Any text", "a photo of a cat"
    return Control("another", label, "text", text, hint=hint, hidden=hidden)


def _class_words(forward: Forward, number: int) -> str:
    score = forward.score_words(forward.share(number))
    return say("named", name=forward.label(number), score=score)
