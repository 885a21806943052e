"""Criteria of training and validation: loss, precision, and accuracy or the loss of an objective without labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from vitlens.data import ImageSet
from vitlens.data.augment import Augment, Targets, normalize, seed_of, transform_batch
from vitlens.data.imageset import lost_workers
from vitlens.processes import World
from vitlens.recorder.forward import eval_mode
from vitlens.recorder.memory import is_out_of_memory
from vitlens.train.optim import PRODUCTS
from vitlens.train.settings import Recipe

WORTH_COMPILING = 2e8
"""Tokens (images × patches) of a run from which compiling is expected to save more time than it takes."""
UNFUSED = 256
"""Number of patches up to which attention stores less for the backward pass than the MLP."""


def computes_bf16(device: torch.device) -> bool:
    """True if the device multiplies bf16 in hardware. Other CPUs are many times slower in bf16 than in fp32."""
    if device.type == "cpu":
        if not torch.backends.mkldnn.is_available():
            return False
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x86 = torch.backends.cpu.get_cpu_capability().startswith(("AVX", "NO AVX", "DEFAULT"))
        return not x86 or torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def computes_fp16(device: torch.device) -> bool:
    """True for CUDA devices that multiply fp16 in tensor cores: capability 7.0 (V100), 7.5 (T4) and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def product_type(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Data type in which the recipe computes matrix products on this device."""
    if recipe.precision == "auto":
        recipe = choose_precision(recipe, World(device=device))
    return PRODUCTS.get(recipe.precision, torch.float32)


def choose_precision(recipe: Recipe, world: World) -> Recipe:
    """The recipe with precision "auto" replaced by bf16 if all processes have it in hardware, else by fp16 or fp32.

    Warns if a CUDA device only emulates a chosen bf16.
    """
    has_bf16 = computes_bf16(world.device)
    if recipe.precision == "bf16" and world.device.type == "cuda" and not has_bf16:
        warnings.warn(
            f"{torch.cuda.get_device_name(world.device)} emulates bf16, which is slower than fp32. Set precision=fp16.",
            RuntimeWarning,
            stacklevel=1,  # one place, so that Python shows it once
        )
    if recipe.precision != "auto":
        return recipe
    if world.total(has_bf16) == world.size:
        return replace(recipe, precision="bf16")
    everywhere = world.total(computes_fp16(world.device)) == world.size
    return replace(recipe, precision="fp16" if everywhere else "fp32")


def autocast(device: torch.device, products: torch.dtype) -> torch.autocast:
    """Context that computes matrix products in this data type."""
    if products == torch.float32:
        return torch.autocast(device.type, torch.bfloat16, enabled=False)
    return torch.autocast(device.type, products)


def soft_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of `logits` (B, classes) with λ·a + (1 − λ)·b, smoothed toward uniform by `smoothing`."""
    log_p = F.log_softmax(logits, dim=-1)
    a = log_p.gather(1, y.a[:, None])[:, 0]
    b = log_p.gather(1, y.b[:, None])[:, 0]
    mixed = y.lam * a + (1 - y.lam) * b
    return -((1 - smoothing) * mixed + smoothing * log_p.mean(dim=-1)).mean()


def sigmoid_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy with the same soft labels, summed over classes and averaged over the batch."""
    labels = torch.zeros_like(logits).scatter_add_(1, y.a[:, None], y.lam[:, None])
    labels = labels.scatter_add_(1, y.b[:, None], 1 - y.lam[:, None])
    labels = (1 - smoothing) * labels + smoothing / logits.shape[1]
    return BinaryCrossEntropy(smoothing=0.0, sum_classes=True)(logits, labels)


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Attention as two matrix products and a softmax, in the precision of its inputs.

    On a CPU, the backward pass of PyTorch's fused attention takes four times as long in bfloat16 as in float32, at
    usual sequence lengths. Unfused bfloat16 products are faster than both (`experiments/training.py`).
    """
    # In spite of their names, these functions concern the CPU too.
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def build_criterion(
    model: nn.Module, recipe: Recipe, device: torch.device | str
) -> Callable[[Tensor, Targets], Tensor]:
    """Forward pass and loss as one function of a batch, compiled as the recipe sets. The model is unchanged.

    If compiling fails (no compiler, no Triton, an old GPU), the function runs uncompiled after a RuntimeWarning. This
    includes the backward pass, which is compiled and tried in the first call, so your own loop needs no precaution.
    compile="auto" compiles here on CUDA, because the length of the run is unknown. `fit` replaces it by its choice.

    >>> digits = vitlens.train.recipe("digits")
    >>> criterion = vitlens.train.build_criterion(digits.build(), digits, "cpu")
    """
    device = torch.device(device)
    products = product_type(recipe, device)
    label_loss = soft_cross_entropy if recipe.loss == "softmax" else sigmoid_cross_entropy
    patches = (recipe.image_size // recipe.patch_size) ** 2
    attention = nullcontext
    if products == torch.bfloat16 and patches <= UNFUSED and device.type == "cpu":
        attention = unfused_attention

    def uncompiled_loss(x: Tensor, y: Targets) -> Tensor:
        with autocast(device, products):
            if hasattr(model, "objective"):
                return model.objective(model, x)
            logits = model(x).float()
        return label_loss(logits, y, recipe.label_smoothing)

    loss = uncompiled_loss
    if compiles(recipe, device):
        # Shapes are few and known (one, or two with patch_drop): specialize instead of guessing which are dynamic.
        compiled = torch.compile(uncompiled_loss, mode=mode_of(recipe), dynamic=False)
        loss = OrUncompiled(compiled, uncompiled_loss, "training continues", model)

    def criterion(x: Tensor, y: Targets) -> Tensor:
        with attention():
            return loss(x, y)

    return criterion


class OrUncompiled:
    """The compiled function, replaced by the uncompiled one after a RuntimeWarning if compiling fails.

    PyTorch compiles a backward pass only when it first runs, and then raises the compiler's own errors. So the backward
    pass for the parameters of `model` runs here after each compilation, its gradients are dropped, and the call is
    repeated. Calls that are repeated start from the same random state and statistics of batch normalization. An error
    that the uncompiled function raises too, such as one of the model, is raised.

    continues: words of the warning, such as "training continues".
    """

    def __init__(
        self,
        compiled: Callable,
        uncompiled: Callable,
        continues: str,
        model: nn.Module | None = None,
    ):
        self.compiled = compiled
        self.uncompiled = uncompiled
        self.continues = continues
        self.model = model
        self.statistics: list[Tensor] | None = None
        self.failed = False

    def __call__(self, x: Tensor, *arguments):
        if self.failed:
            return self.uncompiled(x, *arguments)
        if self.statistics is None:  # now, because the model may have moved to its device
            self.statistics = batch_statistics(self.model)
        restore = restorer(x.device, self.statistics)
        try:
            return self._compiled_with_backward(restore, x, *arguments)
        except Exception as error:  # compilers, their tools and drivers raise errors of many kinds
            if is_out_of_memory(error) or lost_workers(error):
                raise
            problem = first_paragraph(error)
        restore()
        result = self.uncompiled(x, *arguments)
        self.failed = True
        warnings.warn(
            f"Compiling failed on {x.device}, so {self.continues} uncompiled and slower: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )
        return result

    def _compiled_with_backward(self, restore: Callable[[], None], x: Tensor, *arguments):
        """The result of the compiled function, whose backward pass is compiled too."""
        before = graphs_compiled()
        result = self.compiled(x, *arguments)
        if graphs_compiled() == before or not needs_gradient(result):
            return result
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(result, parameters, allow_unused=True)
        del result
        restore()
        return self.compiled(x, *arguments)


def graphs_compiled() -> int:
    """Number of graphs that this process has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def needs_gradient(result: object) -> bool:
    """True for a tensor with a backward pass."""
    return isinstance(result, Tensor) and result.requires_grad


def batch_statistics(model: nn.Module | None) -> list[Tensor]:
    """Buffers of batch normalization, which a forward pass in training changes."""
    if model is None:
        return []
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


def restorer(device: torch.device, buffers: list[Tensor]) -> Callable[[], None]:
    """Function that restores the global random state and the values of the buffers as they are now."""
    state = torch.get_rng_state()
    has_own_state = device.type in ("cuda", "xpu")
    generator = torch.get_device_module(device) if has_own_state else None
    own_state = generator.get_rng_state(device) if has_own_state else None
    values = [buffer.clone() for buffer in buffers]

    def restore() -> None:
        torch.set_rng_state(state)
        if has_own_state:
            generator.set_rng_state(own_state, device)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    return restore


def build_augmentation(
    recipe: Recipe, device: torch.device
) -> Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, Targets]]:
    """(images, labels, numbers) → augmented batch: `transform_batch` by the recipe, one compiled graph on CUDA."""
    mode = mode_of(recipe) if device.type == "cuda" and compiles(recipe, device) else "off"
    return _augmentation(recipe.augment, recipe.image_size, recipe.mean, recipe.std, mode)


@cache  # so that a second run with the same settings does not compile
def _augmentation(augment: Augment, size: int, mean: tuple, std: tuple, mode: str) -> Callable:
    def transform(images: Tensor, labels: Tensor, numbers: dict[str, Tensor]):
        return transform_batch(images, labels, numbers, augment, size=size, mean=mean, std=std)

    if mode == "off":
        return transform
    compiled = torch.compile(transform, mode=mode, dynamic=False, fullgraph=True)
    return OrUncompiled(compiled, transform, "images are augmented")


def first_paragraph(error: BaseException) -> str:
    """At most 300 characters of an error in one line, without its advice on verbosity."""
    paragraph = str(error).strip().split("\n\n")[0]
    return " ".join(paragraph.split())[:300]


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """True if the recipe compiles forward pass and loss on this device."""
    if recipe.compile == "off":
        return False
    if device.type == "cpu":
        return recipe.compile_cpu
    return device.type in ("cuda", "xpu")


def mode_of(recipe: Recipe) -> str:
    """Mode of torch.compile, if the recipe compiles."""
    return "default" if recipe.compile == "auto" else recipe.compile


def choose_compile(recipe: Recipe, device: torch.device, images: int) -> Recipe:
    """The recipe with compile "auto" replaced on CUDA by "off" for a short run on this many images, else by "default".

    On a CPU `compile_cpu` decides, and "auto" remains.
    """
    if recipe.compile != "auto" or device.type == "cpu":
        return recipe
    patches = (recipe.image_size // recipe.patch_size) ** 2
    tokens = recipe.length(images) * recipe.batch_size * patches
    return replace(recipe, compile="default" if tokens >= WORTH_COMPILING else "off")


class ObjectiveLoss(nn.Module):
    """A model as a function from images to the loss of its objective."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.objective(self.model, x)


def accuracy(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe,
    weights: dict[str, Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Top-1 (%) on `data`, of the model or of the model with other `weights`, without test-time augmentation.

    The training flag of each module is unchanged.

    >>> digits, images = vitlens.train.recipe("digits"), vitlens.data.load("digits", "valid", size=8)
    >>> vitlens.train.accuracy(digits.build(), images, digits) < 50  # of random weights
    True
    """

    def count_correct(x: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights or {}, (x,))
        return (logits.argmax(-1) == labels).sum()

    return 100 * mean_over_images(count_correct, model, data, recipe, world)


def objective_loss(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe,
    weights: dict[str, Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Mean loss of `model.objective` on `data`, of the model or of the model with other `weights`.

    The choice of hidden patches depends on the recipe's batch size and parts, and changes the loss in the third digit.
    """
    objective = ObjectiveLoss(model)
    replaced = {f"model.{name}": t for name, t in (weights or {}).items()}

    def sum_losses(x: Tensor, _labels: Tensor) -> Tensor:
        return len(x) * torch.func.functional_call(objective, replaced, (x,))

    return mean_over_images(sum_losses, model, data, recipe, world)


@torch.no_grad()
def mean_over_images(
    measure: Callable, model: nn.Module, data: ImageSet, recipe: Recipe, world: World | None
) -> float:
    """Mean over the images. measure: (normalized images, labels) of a batch → sum over its images.

    Uncompiled: only the paper's recipes validate more than `WORTH_COMPILING` tokens in a run, and there validation is
    at most 2.3 % of the computation, counting a forward pass as a third of a step.
    """
    world = world or World(device=next(model.parameters()).device)
    products = product_type(recipe, world.device)
    total = torch.zeros((), device=world.device)
    in_training = recipe.batch_size // (recipe.accumulate * world.size)
    at_once = min(500, max(in_training, 64))  # at most the memory of training
    mine = torch.arange(len(data)).split(at_once)[world.rank :: world.size]
    seeded_devices = [world.device] if world.device.type == "cuda" else []
    with eval_mode(model), torch.random.fork_rng(devices=seeded_devices):
        for rows, (images, labels) in zip(mine, data.batches(mine), strict=True):
            torch.manual_seed(seed_of(0, int(rows[0])))
            x = normalize(images, recipe.mean, recipe.std)
            with autocast(x.device, products):
                total += measure(x, labels)
    world.sum([total])
    return total.item() / len(data)


def validate(
    model: nn.Module,
    average: dict[str, Tensor],
    valid: ImageSet,
    recipe: Recipe,
    world: World | None = None,
) -> dict[str, float]:
    """`top1` (%) of the model, and `top1_average` of its averaged weights if it has them.

    Without labels: `valid_loss` and `valid_loss_average`, the loss of the model's objective.
    """
    name = metric_name(model)
    measure = objective_loss if name == "valid_loss" else accuracy
    metrics = {name: measure(model, valid, recipe, world=world)}
    if average:
        metrics[f"{name}_average"] = measure(model, valid, recipe, average, world)
    return metrics


def metric_name(model: nn.Module) -> str:
    """Name of the measure in validation: "top1", or "valid_loss" for an objective without labels."""
    return "valid_loss" if hasattr(model, "objective") else "top1"
