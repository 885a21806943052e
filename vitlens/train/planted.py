"""The small ViT that learns the pictures of `vitlens.data.marks`."""

from vitlens.data.marks import COLORS, PATCH, SIDE
from vitlens.train.recipes import recipe

RECIPE = recipe("digits").override(
    f"image_size={SIDE}", f"patch_size={PATCH}", "width=48", "depth=3", f"num_classes={len(COLORS)}", "epochs=5",
    "augment.rotate=0", "augment.scale=[1,1]",
)  # fmt: skip
"""8 × 8 patches and 0.1 M parameters: learns 4,000 pictures within a minute on a CPU."""
