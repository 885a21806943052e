"""Numbers that must not change: statistics, maps, filters, positions, evaluation and training of seven models.

    python tests/golden/golden.py            # print differences from the frozen numbers
    python tests/golden/golden.py --freeze   # freeze them anew

They change only when a wrong number is mended, in the commit that mends it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parent.parent / "data" / "checkpoints"
SMALL = dict(img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=10)
BUNDLED = ("specimen", "vit_tiny_patch8_64")
DEEP = BUNDLED[0]
"""The model that runs in float64: after twelve trained layers, float32 differs by 1e-5 between processors."""
RANDOM = {
    "pooled": ("vit_tiny_patch16_224", SMALL | dict(reg_tokens=2, global_pool="map")),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "rotary": ("eva02_tiny_patch14_224", SMALL | dict(patch_size=16)),
    "biased": ("beit_base_patch16_224", SMALL),
}
MODELS = (*BUNDLED, *RANDOM)
STATISTICS = ("mean_distance", "entropy", "received", "rollout")
MAPS = (
    "relevance",
    "gradient_rollout",
    "legrad",
    "attention_gradient",
    "grad_cam",
    "rollout",
    "balanced_gradients",
    "direct",
)
PIXELS = ("integrated_gradients", "occlusion")
LEFT_OUT = ("gradient_shap", "input_x_gradient", "feature_ablation", "kernel_shap")
"""Maps in `rotary.npz` of methods that vitlens does not have."""


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal float32 numbers, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def fill(model: nn.Module) -> nn.Module:
    """The model in eval mode with parameters drawn by NumPy: norms about 1, matrices that keep activations' size."""
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
            drawn = numbers(tuple(parameter.shape), seed)
            if parameter.dim() == 1:
                parameter.copy_(
                    (1 if "norm" in name and name.endswith("weight") else 0) + 0.1 * drawn
                )
            else:
                parameter.copy_(
                    drawn
                    * (1.5 / parameter[0].numel() ** 0.5 if parameter.dim() in (2, 4) else 0.3)
                )
    return model.eval()


def opened(name: str) -> tuple[nn.Module, Tensor]:
    """A model and its images: a photograph for the bundled ones, noise for the random ones."""
    from vitlens import load_model
    from vitlens.images import samples
    from vitlens.models import preprocess

    if name in BUNDLED:
        model = load_model(CHECKPOINTS / name).eval()
        images = preprocess(model, [samples()["chelsea"]])
        return (model.double(), images.double()) if name == DEEP else (model, images)
    architecture, arguments = RANDOM[name]
    return fill(timm.create_model(architecture, **arguments)), numbers((2, 3, 64, 64), 1000)


def of_model(name: str) -> Iterator[tuple[str, object]]:
    from vitlens import (
        attention,
        attribution,
        capture,
        faithfulness,
        filters,
        positions,
        stream,
        tokens,
    )

    model, images = opened(name)
    if name in BUNDLED:
        yield "input", images[..., ::8, ::8]
    with torch.no_grad(), capture(model) as attn:
        logits = model(images)
    yield "logits", logits[:, :20]
    summary = attention.summary(attn, *STATISTICS)
    for statistic in STATISTICS:
        values = getattr(summary, statistic)
        yield statistic, values[:, ::3] if statistic == "received" and name in BUNDLED else values
    yield "distance_renormalized", attention.mean_distance(attn, renormalize=True)
    yield "rollout_from_patch", attention.rollout(attn, query=(1, 2))
    yield "row", attn[1].weights(queries=[0, 5])
    for method in MAPS:
        yield method, getattr(attribution, method)(model, images, 3)
    yield "relevance_against", attribution.relevance(model, images, 3, against=1)
    if name == "rotary":
        for method in PIXELS:
            yield method, getattr(attribution, method)(model, images[:1], 3)
    parts = stream.contributions(model, images, 3)
    for part in ("embedding", "heads", "mlps", "pool", "biases"):
        yield f"contribution_{part}", getattr(parts, part)
    features, _ = tokens.features(model, images)
    grid = attn.grid
    scores, ratio = tokens.components(features[-1][0, grid.prefix :])
    yield "token_components", scores
    yield "token_variance", ratio
    yield "token_norms", tokens.norms(features[1])
    query = features[-1].new_zeros(features[-1].shape[:2])
    query[:, grid.prefix] = 1
    yield "token_similarity", tokens.similarity(features[-1], query)
    if name != "pooled":
        yield "lens", stream.lens(model, images, 1)[0][:, :20]
    components, variance = filters.principal(model, k=6)
    yield "filters", components
    yield "filters_variance", variance
    if name not in ("rotary", "biased"):
        similarity = positions.similarity(model)
        yield "position_similarity", similarity[::3, ::3] if name in BUNDLED else similarity
        yield "position_rank", positions.rank_correlation(similarity)
        table = positions.table(model).flatten(0, 1)[None]
        yield (
            "resized",
            positions.resize(table, grid=(grid.rows, grid.cols), size=(5, 7), prefix=0)[..., :8],
        )
    ramp = numbers((1, grid.rows, grid.cols), 7).expand(len(images), -1, -1)
    found = faithfulness.curves(model, images, ramp, 3, step=max(1, grid.patches // 8))
    for curve in ("deletion", "insertion"):
        yield f"curve_{curve}", getattr(found, curve)
    if name == "rotary":
        yield (
            "randomization",
            faithfulness.randomization(
                model, images[:1], attribution.relevance, 3
            ).rank_correlation,
        )


def of_training(name: str = "digits") -> Iterator[tuple[str, object]]:
    from vitlens import data
    from vitlens.train import fit
    from vitlens.train.recipes import recipe
    from vitlens_paper import evaluate

    plan = replace(recipe("digits"), log_every=1, precision="fp32")
    splits = [data.load("digits", split, size=plan.image_size) for split in ("train", "valid")]
    model = plan.build()
    losses = [step.loss for step in islice(fit(model, splits, plan), 50)]
    yield "first_losses", torch.tensor(losses[:5])
    yield "loss_50", torch.tensor(losses[49])
    random = fill(plan.build())
    (train, truth), (valid, labels) = (evaluate.features(random, split) for split in splits)
    yield "features", valid[:4, :20]
    yield "nearest", torch.tensor([int((evaluate.nearest((train, truth), valid) == labels).sum())])
    yield "probe", torch.tensor(evaluate.linear_probe((train, truth), (valid, labels)))


FUNCTIONS: dict[str, Callable] = {**{name: of_model for name in MODELS}, "training": of_training}


def computed(name: str) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {key: torch.as_tensor(value).detach().numpy() for key, value in FUNCTIONS[name](name)}


def frozen(name: str) -> dict[str, np.ndarray]:
    with np.load(HERE / f"{name}.npz") as file:
        return {key: file[key] for key in file if key not in LEFT_OUT}


def difference(key: str, value: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a share of the tolerance: 1e-5 of the largest value, other shares for losses."""
    share = {"first_losses": 1e-4, "loss_50": 2e-2, "nearest": 0}.get(key, 1e-5)
    largest = (
        np.abs(value - expected).max() / np.abs(expected).max()
        if expected.any()
        else np.abs(value).max()
    )
    return float(largest / share) if share else float(largest > 0) * 2


def main() -> None:
    for name in FUNCTIONS:
        values = computed(name)
        if "--freeze" in sys.argv:
            kept = {
                key: v.astype(np.float32) if v.dtype == np.float64 else v
                for key, v in values.items()
            }
            np.savez_compressed(HERE / f"{name}.npz", **kept)
        expected = frozen(name)
        print(
            name,
            len(values),
            {
                k: round(difference(k, v, expected[k]), 3)
                for k, v in values.items()
                if difference(k, v, expected[k]) > 0.1
            },
            values.keys() ^ expected.keys(),
        )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
