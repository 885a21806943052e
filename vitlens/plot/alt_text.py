"""Images with alt text in the outputs of notebooks."""

from __future__ import annotations

import base64
import html


def image(file: bytes, alt: str, width: int) -> str:
    """HTML of a PNG or JPEG file, `width` pixels wide, with its alt text.

    nbconvert, repository pages and JupyterLab show HTML rather than an image of the same output, and only HTML has alt
    text in all of them.
    """
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    source = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    return f'<img alt="{html.escape(alt)}" width="{width}" src="{source}">'


def bundle(png: bytes, alt: str, width: int, sharp: bytes = b"") -> dict[str, str]:
    """Output of a notebook with the PNG, HTML and, for text alone, the alt text. sharp: another file for the HTML."""
    return {
        "text/plain": alt,
        "text/html": image(sharp or png, alt, width),
        "image/png": base64.b64encode(png).decode(),
    }
