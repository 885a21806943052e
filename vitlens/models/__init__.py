"""Open models, name their classes, turn logits into scores, and prepare images for them.

A model is the name of a timm model, a name in another library ("hf:facebook/dinov2-small"), or a local folder in timm's
or transformers' layout. Pickled code is never run. The library of a model prepares its images, and `restore` inverts
its normalization.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
