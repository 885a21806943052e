"""Conversion from embedded color profiles (ICC) to sRGB."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms


def in_srgb(image: Image.Image, alpha: Image.Image | None) -> tuple[Image.Image, str]:
    """A loaded PIL image, converted to sRGB from the profile that it brings, and what is to be said of that, or "".

    alpha: its transparency, which stays. One whose profile is damaged, does not fit its pixels, or is that of sRGB by
    any name is returned as it is.
    """
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        title = ImageCms.getProfileDescription(profile).strip() or "without a name"
        space = profile.profile.xcolor_space.strip()
        mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(space)
        own = {"L": "GRAY", "LA": "GRAY", "La": "GRAY", "1": "GRAY", "CMYK": "CMYK"}.get(image.mode, "RGB")
        fits = space == own or (space, own) == ("RGB", "GRAY")
        if mode is None or not fits or image.mode[0] in "IF":
            return image, f"has a color profile, “{title}”, that does not fit its kind of pixels and was ignored"
        convert = ImageCms.buildTransform(
            profile, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )  # fmt: skip
        if mode != "CMYK" and _changes_nothing(convert, mode):
            return image, ""
        converted = ImageCms.applyTransform((alpha or image).convert(mode), convert)
    except Exception:  # whatever is wrong with the profile, the picture itself is still one
        return image, "has a color profile that is damaged or that this Pillow cannot apply, and was ignored"
    if alpha is not None:
        converted.putalpha(alpha.getchannel("A"))
    return converted, f"was converted from the color profile “{title}” to sRGB"


def _changes_nothing(convert: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether a conversion changes every color by two levels (of 255) at most."""
    steps = np.linspace(0, 255, 256 if mode == "L" else 18).round().astype(np.uint8)
    colors = steps[None] if mode == "L" else np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3)
    found = np.asarray(ImageCms.applyTransform(Image.fromarray(colors), convert)).astype(int)
    return np.abs(found - (colors[..., None] if mode == "L" else colors)).max() <= 2
