"""The part of an audit's page that compares two models: sentences and bars of the clearest differences."""

from __future__ import annotations

from vitlens.evidence import Audit, Changes
from vitlens.texts import shown

ROWS = 8
"""Most groups, and most heads of a measure, in a page."""
MEASURES = {
    "mean_distance": ("mean attention distance", "pixels"),
    "entropy": ("entropy of attention", "nats"),
}
"""Name and unit of each measure of `vitlens.evidence.HEAD_MEASURES`."""
NOTHING = (
    "No group and no head changed by this test. The models can still differ in what it misses, such as groups that "
    "only the second model goes by."
)


def signed(value: float) -> str:
    """A difference with its sign and two digits.

    >>> signed(0.123), signed(-0.5), signed(0.001)
    ('+0.12', '−0.50', '0.00')
    """
    text = f"{abs(value):.2f}"
    if float(text) == 0:
        return text
    return f"−{text}" if value < 0 else f"+{text}"


def counts(changes: Changes) -> tuple[int, int, int, int]:
    """Changed groups, all compared groups, changed heads, and all compared heads."""
    heads = changes.heads
    both = ["layer", "head"]
    changed = heads[heads["changed"].astype(bool)]
    return (
        int(changes.groups["changed"].sum()),
        len(changes.groups),
        len(changed[both].drop_duplicates()),
        len(heads[both].drop_duplicates()),
    )


def changed_words(changes: Changes) -> str:
    """Sentence with the numbers of changed groups and heads."""
    groups, all_groups, heads, all_heads = counts(changes)
    words = f"Changed groups: {groups:,} of {all_groups:,}."
    return f"{words} Changed heads: {heads:,} of {all_heads:,}." if all_heads else words


def group_words(row: dict) -> str:
    """Sentence on the difference of a group, from its row of `Changes.groups`."""
    return (
        f"The effect of covering it is {signed(row['effect'])} on the first model and "
        f"{signed(row['effect_beside'])} on the second. {_difference(row)}"
    )


def head_words(row: dict) -> str:
    """Sentence on the difference of a head, from its row of `Changes.heads`."""
    name, unit = MEASURES[row["measure"]]
    return (
        f"Layer {row['layer']}, head {row['head']}: the {name} is {row['mean']:.3g} {unit} in the first model and "
        f"{row['mean_beside']:.3g} in the second. {_difference(row, f' {unit}')}"
    )


def _difference(row: dict, unit: str = "") -> str:
    """Sentence with the difference of a row, its interval, and whether it counts as changed."""
    interval = f"{signed(row['low'])} to {signed(row['high'])}"
    verdict = "changed" if row["changed"] else "not changed"
    return f"Difference: {signed(row['difference'])}{unit}, 95 % interval {interval}, {verdict}."


def lead(changes: Changes, model: str, beside: str, labeled: bool) -> list[str]:
    """Sentences above the differences of two models by name."""
    words = [
        f"{shown(model)} is the first model, {shown(beside)} the second. Both received the same images, "
        "with the same patches covered. Differences are first less second.",
        changed_words(changes),
    ]
    if labeled:
        first, second = changes.accuracy
        words.append(
            f"Accuracy on the tested images: {100 * first:.1f} % of the first model, {100 * second:.1f} % of the "
            "second."
        )
    groups, _, heads, _ = counts(changes)
    if not groups and not heads:
        words.append(NOTHING)
    return words


def content(found: Audit, model: str, beside: str, labeled: bool) -> dict | None:
    """Sentences and bars of the comparison of two models by name, None without a second model."""
    changes = found.changes
    if changes is None:
        return None
    groups = []
    for row in changes.groups.head(ROWS).to_dict("records"):
        group = {"group": row["group"], "name": f"group {row['group']}", "words": group_words(row)}
        groups.append(group | _bar(row, 1.0))
    charts = []
    for measure, (name, _) in MEASURES.items():
        rows = changes.heads[changes.heads["measure"] == measure].head(ROWS)
        bars = [_head(row) for row in rows.to_dict("records")]
        if bars:
            charts.append({"title": name.capitalize(), "bars": bars})
    heads = changes.heads.head(ROWS).to_dict("records")
    return {
        "title": f"Beside {shown(beside)}",
        "lead": lead(changes, model, beside, labeled),
        "notes": changes.notes,
        "groups": groups,
        "charts": charts,
        "heads": [head_words(row) for row in heads],
    }


def _head(row: dict) -> dict:
    """Name and bar of a head: its difference as a share of the larger of the two means."""
    larger = max(abs(row["mean"]), abs(row["mean_beside"])) or 1.0
    name = f"L{row['layer']} H{row['head']}"
    return {"name": name, "words": head_words(row)} | _bar(row, larger)


def _bar(row: dict, unit: float) -> dict:
    """Difference and interval of a row in a unit."""
    return {
        "effect": row["difference"] / unit,
        "low": row["low"] / unit,
        "high": row["high"] / unit,
        "changed": bool(row["changed"]),
    }
