"""Class-specific maps: which patches speak for a class, by eleven methods with one signature.

    relevance(model, images, target)            # (B, rows, cols), float32 or wider, on the model's device

model: a supported timm Vision Transformer (`recorder.families`) with a classifier, in any mode, frozen or not. images:
(B, C, H, W), normalized as the model wants them. target: a class number, a class name, one of either for each image, or
None for the predicted class; `names` are the classes' names in order, by default the model's own. All explain the
target's logit, or, with `against` another class, why the target rather than that one: the difference of the two logits,
which is meant wherever a method speaks of the target's logit. The model runs in eval mode and is left as it was, its
flags and everybody's `.grad` too. Maps are not rescaled. Methods that start from a row take `query=(row, column)` to
start from a patch instead of the read-out.

The first five need one forward and one backward pass and nothing else; those of captum need captum.

Raises ValueError for a target that is no class of the model, for images of the wrong kind, for a model without classes,
for outputs that are no numbers and where no gradient reaches a layer; UnsupportedModelError for a model that vitlens
refuses.
"""

from types import MappingProxyType

from vitlens.attribution.gradcam import grad_cam
from vitlens.attribution.legrad import legrad
from vitlens.attribution.path import gradient_shap, input_x_gradient, integrated_gradients
from vitlens.attribution.perturbation import feature_ablation, kernel_shap, occlusion
from vitlens.attribution.relevance import attention_gradient, relevance
from vitlens.attribution.rollout import gradient_rollout

METHODS = MappingProxyType(
    {
        method.__name__: method
        for method in (
            gradient_rollout, relevance, legrad, attention_gradient, grad_cam,
            integrated_gradients, gradient_shap, input_x_gradient, occlusion, feature_ablation, kernel_shap,
        )
    }
)  # fmt: skip

__all__ = ["METHODS", *METHODS]
