"""Training in fp16: precision, skipped steps, and resumption."""

import math
from dataclasses import replace

import pytest
import torch
from support import digits, refuses, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from vitlens.train import World, build_criterion, criteria, fit
from vitlens.train.criteria import choose_precision
from vitlens.train.optim import Muon, optimizers, orthogonalize
from vitlens.train.overflow import Overflow
from vitlens.train.run_folder import flat_state

torch.set_num_threads(1)
NARROW = {"patch_size": 4, "depth": 1, "average": 0.9, "precision": "fp16"}


@pytest.fixture(scope="module")
def data():
    return digits()


class Results(TorchDispatchMode):
    """Operations that returned fp16."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float16:
            self.names.add(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])  # beside Muon, AdamW
def test_fp16_is_near_fp32_and_resumes_bit_exactly(data, optimizer, tmp_path):
    r = replace(tiny(**NARROW, save_every=0.0), optimizer=optimizer)
    whole, exact, resumed = r.build(), r.build(), r.build()
    averages = {}, {}
    losses = [s.loss for s in fit(whole, data, r, device="cpu", average=averages[0])]
    fp32 = [s.loss for s in fit(exact, data, replace(r, precision="fp32"), device="cpu")]
    assert losses != fp32 and losses == pytest.approx(fp32, rel=0.01)

    for step in fit(r.build(), data, r, device="cpu", out=tmp_path):
        if step.step == 11:
            break
    training = fit(resumed, data, r, device="cpu", out=tmp_path, resume=True, average=averages[1])
    assert [s.loss for s in training] == losses[11:]
    equal = [torch.equal(a, b) for a, b in zip(*map(parameters, (whole, resumed)), strict=True)]
    assert all(equal) and all(torch.equal(t, averages[1][n]) for n, t in averages[0].items())


def parameters(model):
    return list(model.parameters())


def test_fp16_computes_products_in_fp16(data):
    r = tiny(**NARROW)
    with Results() as results:
        next(fit(r.build(), data, r, device="cpu"))
    assert {"addmm", "baddbmm"} <= results.names  # the model's and Muon's


class Poison:
    """A criterion whose gradient is infinite at some steps, or whose loss is."""

    def __init__(self, model, r, steps, loss=False):
        self.criterion, self.steps, self.loss = build_criterion(model, r, "cpu"), steps, loss
        self.step = 0

    def __call__(self, x, y):
        self.step += 1
        loss = self.criterion(x, y)
        if self.step not in self.steps:
            return loss
        if self.loss:
            return loss * math.inf
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("poisoned", [1, 3])
def test_skipped_step_changes_nothing(data, optimizer, poisoned, monkeypatch):
    r = replace(tiny(**NARROW), optimizer=optimizer)
    model, average, made = r.build(), {}, []

    def kept_optimizers(*arguments):
        made.extend(optimizers(*arguments))
        return made

    monkeypatch.setattr("vitlens.train.loop.optimizers", kept_optimizers)
    training = fit(
        model, data, r, device="cpu", average=average, criterion=Poison(model, r, {poisoned})
    )
    states = [{n: t.clone() for n, t in model.state_dict().items()}]
    for step in training:
        state = flat_state(model, average, made)
        states.append({n: t.clone() for n, t in state.items()})
        if step.step == 4:
            break
    after = states[poisoned]
    if poisoned == 1:
        before = {f"model.{n}": t for n, t in states[0].items()}
        before |= {f"average.{n}": t for n, t in states[0].items()}
        before |= {n: torch.zeros_like(t) for n, t in after.items() if n.startswith("optimizer")}
    else:
        before = states[poisoned - 1]
        assert any(n.endswith(".step") for n in before) or optimizer == "sgd"
    assert before.keys() == after.keys() and len(after) > len(states[0])
    assert all(torch.equal(before[n], t) for n, t in after.items())
    later = states[4]
    assert all(t.isfinite().all() for t in later.values())
    moved = [n for n, t in later.items() if not torch.equal(after[n], t)]
    assert {n.partition(".")[0] for n in moved} == {"model", "average", "optimizer"}


def test_skipped_step_keeps_statistics_of_batch_norm():
    statistics, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    overflow = Overflow(tiny(precision="fp16"), [optimizer], [statistics], 0)
    for norm, expected in ((math.nan, 1.0), (2.0, 5.0)):
        overflow.remember()
        statistics.fill_(5.0 if math.isfinite(norm) else math.inf)
        overflow.decide(torch.tensor(norm))
        assert (statistics == expected).all()


def test_fp16_reports_an_overflown_loss_as_none(data, tmp_path):
    r = tiny(**NARROW, save_every=0.0)
    model = r.build()
    training = fit(
        model, data, r, device="cpu", out=tmp_path, criterion=Poison(model, r, {2, 16}, loss=True)
    )
    steps = list(training)
    assert [s.step for s in steps if s.loss is None] == [2, 16] and steps[-1].metrics
    assert '"loss": null' in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize(
    "poisoned, ends",
    [
        (range(3, 13), "10 of the 12 steps up to step 12 were skipped, 10 of them in a row"),
        (range(3, 12), None),
        ((5, 8), "2 of the 20 steps up to step 20 were skipped, 1 of them in a row"),
        ((8,), None),
        ((8, 28), None),
    ],
)
def test_fit_ends_after_too_many_skips(poisoned, ends):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    overflow = Overflow(tiny(precision="fp16"), [optimizer], [], 0)

    def follow():
        # Nine in a row are 45 % of 20 steps, so that case stops before they are counted.
        last = 15 if len(poisoned) == 9 else 40
        for step in range(1, last + 1):
            norm = torch.tensor(math.inf if step in poisoned else 1.0)
            overflow.decide(norm)
            overflow.read(torch.tensor(1.0), norm, step - 1)

    if ends is None:
        follow()
    else:
        refuses(ends, follow, error=FloatingPointError)


def test_fit_in_fp16_ends_after_ten_skips_in_a_row(data, tmp_path):
    r = tiny(**NARROW, save_every=0.0)
    model = r.build()
    training = fit(
        model, data, r, device="cpu", out=tmp_path, criterion=Poison(model, r, range(2, 99))
    )
    refuses("up to step 11 were skipped.*precision=fp32", list, training, error=FloatingPointError)
    assert all(p.isfinite().all() for p in model.parameters())


def test_muon_in_fp16_orthogonalizes_small_gradients():
    gradient = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(gradient[None])[0]
    for size in (1e-9, 1.0, 1e9):
        p = torch.nn.Parameter(torch.zeros(48, 32))
        p.grad = gradient * size
        Muon([p], lr=1.0, momentum=0.0, products=torch.float16).step()
        found = -p.detach() / (0.2 * 48**0.5)
        assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_precision_auto_selects_fp16_on_a_t4(monkeypatch):
    world = World(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    chosen = {(6, 1): "fp32", (7, 0): "fp16", (7, 5): "fp16", (8, 0): "bf16"}
    for capability, precision in chosen.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_precision(tiny(precision="auto"), world).precision == precision
        expected = criteria.PRODUCTS.get(precision, torch.float32)
        assert criteria.product_type(tiny(precision="auto"), world.device) == expected
        explicit = tiny(precision="bf16")
        if precision == "bf16":
            assert choose_precision(explicit, world) == explicit
            continue
        with pytest.warns(RuntimeWarning, match="Tesla T4 emulates bf16.*precision=fp16"):
            assert choose_precision(explicit, world) == explicit
