"""Features of vitlens by model class, on small models with random weights: all supported classes, three of them timm's.

    python -m experiments.support --out data/results/support.csv

It takes a minute. Tests build the same models, and compare single rows with the table.
"""

import contextlib
import importlib.metadata
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from experiments.results import command, parser, write
from vitlens import capture
from vitlens.attribution import METHODS
from vitlens.recorder.forward import run
from vitlens.recorder.supported import family

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
SQUARE = dict(image_size=32, patch_size=8)


def _build(name: str, config: str, both: str = "", text: dict | None = None, **settings):
    """A model of transformers; both: the configuration of text and vision together. text: more of its text tower."""
    import transformers

    if both:
        text = (
            SMALL
            | dict(vocab_size=99, max_position_embeddings=16, projection_size=32)
            | (text or {})
        )
        settings = {
            k: settings.pop(k) for k in ("num_labels", "projection_dim") if k in settings
        } | {
            "vision_config": settings,
            "text_config": text,
        }
    return getattr(transformers, name)(getattr(transformers, both or config)(**settings))


def _plain(**more) -> dict:
    return SMALL | SQUARE | more


SIGLIP2 = SMALL | dict(patch_size=8, num_patches=16)
TRANSFORMERS = {
    "ViTModel": ("ViTConfig", _plain()),
    "ViTForImageClassification": ("ViTConfig", _plain(num_labels=7)),
    "DeiTModel": ("DeiTConfig", _plain()),
    "DeiTForImageClassification": ("DeiTConfig", _plain(num_labels=7)),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", _plain(num_labels=7)),
    "ViTMAEModel": ("ViTMAEConfig", _plain(mask_ratio=0.0)),
    "BeitModel": ("BeitConfig", _plain(use_relative_position_bias=True, use_mean_pooling=False)),
    "BeitForImageClassification": (
        "BeitConfig",
        _plain(num_labels=7, use_relative_position_bias=True, layer_scale_init_value=0.5),
    ),
    "IJepaModel": ("IJepaConfig", _plain()),
    "IJepaForImageClassification": ("IJepaConfig", _plain(num_labels=7)),
    "Dinov2Model": ("Dinov2Config", _plain()),
    "Dinov2ForImageClassification": ("Dinov2Config", _plain(num_labels=7)),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", _plain(num_register_tokens=3)),
    "Dinov2WithRegistersForImageClassification": (
        "Dinov2WithRegistersConfig",
        _plain(num_register_tokens=3, num_labels=7),
    ),
    "DINOv3ViTModel": ("DINOv3ViTConfig", _plain(num_register_tokens=2)),
    "CLIPVisionModel": ("CLIPVisionConfig", _plain()),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", _plain(projection_dim=24)),
    "CLIPForImageClassification": ("CLIPConfig", _plain(num_labels=7)),
    "CLIPModel": ("CLIPConfig", _plain(projection_dim=24)),
    "SiglipVisionModel": ("SiglipVisionConfig", _plain()),
    "SiglipForImageClassification": ("SiglipConfig", _plain(num_labels=7)),
    "SiglipModel": ("SiglipConfig", _plain()),
    "Siglip2VisionModel": ("Siglip2VisionConfig", SIGLIP2),
    "Siglip2ForImageClassification": ("Siglip2Config", SIGLIP2 | {"num_labels": 7}),
    "Siglip2Model": ("Siglip2Config", SIGLIP2),
}


def small(name: str, **more):
    """A model in eval mode, with all weights different, by the name of its class in transformers or its name here."""
    torch.manual_seed(0)
    if name in TRANSFORMERS:
        config, settings = TRANSFORMERS[name]
        both = config if config in ("CLIPConfig", "SiglipConfig", "Siglip2Config") else ""
        model = _build(name, config, both, **settings | more)
    elif name == "torchvision":
        from torchvision.models import VisionTransformer

        model = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=7, **more)
    else:
        model = _open_clip(**OPEN_CLIP[name] | more)
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


POOL = dict(attentional_pool=True, attn_pooler_queries=4, attn_pooler_heads=2)
OPEN_CLIP = {
    "open_clip": {},
    "open_clip, mean": dict(pool_type="avg"),
    "open_clip, pool": POOL,
    "open_clip, mean of a pool": POOL | dict(pool_type="avg"),
    "open_clip, timm": dict(
        timm_model_name="test_vit", timm_pool="", timm_proj="linear", image_size=160
    ),
}
TEXT = dict(context_length=8, vocab_size=99, width=32, heads=2, layers=2)


def _open_clip(**vision):
    from open_clip import model

    vision = dict(layers=2, width=32, head_width=16, image_size=32, patch_size=8) | vision
    kind = model.CustomTextCLIP if "timm_model_name" in vision else model.CLIP
    return kind(24, vision, TEXT)


EVERY = [*TRANSFORMERS, "torchvision", *OPEN_CLIP]
CLASSIFIERS = [name for name in TRANSFORMERS if "Classification" in name] + ["torchvision"]


def last_linear(model) -> torch.nn.Linear:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]


def takes_other_sizes(model) -> bool:
    height, width = family(model).built_size
    try:
        return bool(family(model).grid((height, width + 16)))
    except ValueError:
        return False


def sized(model, rows: int = 32, cols: int = 48, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Random images of a size, or of the one size that a model takes."""
    about = family(model)
    weight = next(model.parameters())
    size = (rows, cols) if takes_other_sizes(model) else about.built_size
    images = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))
    return images.to(weight.dtype)


class _Wide(TorchFunctionMode):
    """Softmax in the dtype of the logits; in most of transformers' eager paths it is in float32, also for float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.softmax and args[0].dtype == torch.float64:
            kwargs["dtype"] = None
        return func(*args, **kwargs)


@contextlib.contextmanager
def eager(model):
    """Context with a list of the attention of every layer, (B·H, T, T), from the library's unfused path:
    transformers' eager path, timm's unfused path, or nn.MultiheadAttention with need_weights."""
    maps, about, softmax = [], family(model), F.softmax

    def noted(*args, **kwargs):
        maps.append(softmax(*args, **kwargs))
        return maps[-1]

    modules = [module for layer in about.attention() for _, module in layer]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch.nn.MultiheadAttention):
                ask = lambda m, args, kwargs: (args, kwargs | dict(need_weights=True))  # noqa: E731
                stack.callback(module.register_forward_pre_hook(ask, with_kwargs=True).remove)
                F.softmax = noted
                stack.callback(setattr, F, "softmax", softmax)
                continue
            elif hasattr(module, "fused_attn"):
                module.fused_attn = False
                stack.callback(setattr, module, "fused_attn", True)
                stack.callback(
                    module.attn_drop.register_forward_hook(
                        lambda m, args, out: maps.append(out)
                    ).remove
                )
                continue
            stack.callback(
                module.register_forward_hook(lambda m, args, out: maps.append(out[1])).remove
            )
        if hasattr(about, "config"):
            stack.enter_context(_Wide())
            about.tower.set_attn_implementation("eager")
            stack.callback(about.tower.set_attn_implementation, "sdpa")
        yield maps


TABLE = Path(__file__).parent.parent / "data" / "results" / "support.csv"
LIBRARIES = ("timm", "transformers", "torchvision", "open-clip-torch", "torch")
TIMM = ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "beit_base_patch16_224")


def of_timm(name: str):
    torch.manual_seed(0)
    return timm.create_model(
        name, depth=2, num_heads=2, embed_dim=32, img_size=32, patch_size=8, num_classes=7
    ).eval()


def survey(name: str) -> dict:
    """One row of the table. error: the largest difference of a map, in float64, from the library's own path. maps: the
    methods of attribution that gave finite maps of a class; not: those that were refused."""
    model = (of_timm(name) if name in TIMM else small(name)).double()
    images, about = sized(model, 32, 32), family(model)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        plain = run(model, images)
        with capture(model) as attn:
            output = run(model, images)
        with eager(model) as maps:
            run(model, images)
    torch.backends.mha.set_fastpath_enabled(before)
    pairs = [
        (layer.weights(), each.view_as(layer.weights()))
        for layer, each in zip(attn, maps, strict=False)
    ]
    error = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    library = type(model).__module__.split(".")[0]
    row = {
        "library": library,
        "class": type(model).__name__,
        "model": name,
        "captured": "yes",
        "same bits": "yes" if torch.equal(plain, output) else "no",
        "error": f"{error:.0e}",
        "prefix": "; ".join(about.prefix),
        "reads": reads(attn),
        "other sizes": "yes" if takes_other_sizes(model) else "no",
        "outputs": "classes" if about.classes else "features",
    }
    done, refused = [], []
    for method in METHODS.values() if about.classes else ():
        try:
            found = method(model, images, 2)
            (done if found.isfinite().all() else refused).append(method.name)
        except ValueError:
            refused.append(method.name)
    return row | {
        "maps": "; ".join(done),
        "not": "; ".join(refused),
        "apart": "no" if about.stream_problem else "yes",
    }


def reads(attn) -> str:
    row, grid = attn.grid.readout, attn.grid
    if row is None:
        return "no single row"
    if row.dim() == 2:
        return "attention pool"
    named = [number for number in range(grid.prefix) if row[number] > 0]
    return (
        "patches"
        if not named
        else "class token"
        if named == [0]
        else "class and distillation token"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    made_by = f"{command('experiments.support', arguments)}; {versions}; {platform.machine()}; random weights, seed 0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = (*TIMM, *EVERY)[:: 8 if options.tiny else 1]
        write(options.out, [survey(name) | {"command": made_by} for name in names])


if __name__ == "__main__":
    main()
