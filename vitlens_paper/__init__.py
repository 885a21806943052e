"""The paper as data: "An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021, arXiv 2010.11929v2.

`MODELS` are its models, which `build` builds through timm. `TABLE_1`, `TABLE_3` and `TABLE_4` hold architectures and
training settings, `COSTS` parameters and FLOPs, and the other tables results.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
