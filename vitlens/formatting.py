"""Numbers in sentences and labels, and sentences of both figures and pages."""

PREDICTION = {
    "predicts": "The model predicts {classes}.",
    "also predicts": "The model also predicts {classes}.",
    "no label": "No label is above 50%.",
    "highest label": "No label is above 50%. The highest is {classes}.",
    "more classes": "{classes} and {count} more",
}
"""Sentences about the prediction beside a target. The explorer's pages fill in the same ones."""


def number(value: float) -> str:
    """Three significant digits, with a proper minus sign.

    >>> number(-0.12345)
    '−0.123'
    """
    return with_minus(f"{value:.3g}")


def with_minus(text: str) -> str:
    """The text with minus signs in place of hyphens.

    >>> with_minus("-1 to 1")
    '−1 to 1'
    """
    return text.replace("-", "−")
