"""How far to trust a map: what the model says when the patches that a map names are covered, shown or known.

    maps = {"relevance": relevance(model, images, target), "rollout": …}     # each (B, rows, cols)
    table(model, images, maps, target)                # all areas, ranks, and where they lie against random orders

Maps are tensors (…, B, rows, cols) on the patches of the images, larger for what speaks for the class; the dimensions
in front, such as one for methods, come back in front of the results, and all maps share the model's batches. model:
anything that gives (B, classes) logits; where it is no timm model that vitlens knows, its patches are told by
`grid=TokenGrid(…)`. images: (B, C, H, W), normalized as the model wants them. target: a class number or name, one for
each image, or None for the predicted class; against: the class that it is contrasted with, if any. The model runs in
eval mode without autograd and is left as it was.

* `curves`: insertion and deletion, with their areas. `random_maps`: the control. `table`: both, for many maps at once.
* `confidence`: drop and increase in confidence when only what the map names is seen.
* `pointing`, `energy_in_box`: where it is known where the object is.
* `randomization`: whether the map changes at all when the model's weights are replaced by random ones.

No score says that a map is right: each measures one consequence that a right map would have, and covering patches shows
the model pictures of a kind it never saw. Compare maps by the same score, the same baseline and the same step.
"""

from vitlens.faithfulness._confidence import Confidence, confidence
from vitlens.faithfulness._curves import Curves, curves, usual_step
from vitlens.faithfulness._randomization import Randomization, randomization
from vitlens.faithfulness._table import table
from vitlens.faithfulness.baselines import BASELINES, blurred
from vitlens.faithfulness.boxes import energy_in_box, pointing
from vitlens.faithfulness.orders import random_maps

__all__ = [
    "BASELINES", "Confidence", "Curves", "Randomization", "blurred", "confidence", "curves", "energy_in_box",
    "pointing", "random_maps", "randomization", "table", "usual_step",
]  # fmt: skip
