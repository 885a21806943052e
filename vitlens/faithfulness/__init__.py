"""How far to trust a map: scores from covering or showing the patches that it highlights, and more.

    maps = {"relevance": relevance(model, images, target), "rollout": …}     # each (B, rows, cols)
    table(model, images, maps, target)                # all areas, ranks, and where they lie against random orders

Maps are tensors (…, B, rows, cols) on the patches of the images, with larger values for what speaks for the class.
Leading dimensions, such as one for methods, come first in the results too; all maps share the model's batches. model:
anything that gives (B, classes) logits; for a model that vitlens does not know, give its patches by
`grid=TokenGrid(…)`. images: (B, C, H, W), normalized as the model wants them. target: a class number or name, one for
each image, or None for the predicted class. against: a class to contrast it with. The model runs in eval mode without
autograd and is left as it was.

* `curves`: insertion and deletion, with their areas. `random_maps`: the control. `table`: both, for many maps at once.
* `confidence`: drop and increase in confidence when only what the map highlights is visible.
* `randomization`: whether the map changes when the model's weights are replaced by random ones.

No score proves that a map is right: each measures one consequence that a right map would have, and covered patches make
pictures of a kind that the model never saw. Compare maps by the same score, the same baseline and the same step.
"""

from vitlens.faithfulness._randomization import Randomization, randomization
from vitlens.faithfulness._scores import Confidence, Curves, confidence, curves, usual_step
from vitlens.faithfulness._table import table
from vitlens.faithfulness.covering import BASELINES, blurred
from vitlens.faithfulness.orders import random_maps

__all__ = [
    "BASELINES", "Confidence", "Curves", "Randomization", "blurred", "confidence", "curves",
    "random_maps", "randomization", "table", "usual_step",
]  # fmt: skip
