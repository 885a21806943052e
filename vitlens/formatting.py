"""Numbers in sentences and labels."""


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
