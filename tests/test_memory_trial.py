"""Memory that runs out in training: the message names a batch that was tried and fits. Simulated limits on the CPU."""

import weakref
from dataclasses import replace

import pytest
import torch
from support import digits, tiny
from test_processes import hybrid

from vitlens import cli
from vitlens.train import World, build_criterion, fit, loop, recipe
from vitlens.train.memory import MemoryTrial, smaller_recipes
from vitlens_paper.masked import MaskedPatches

torch.set_num_threads(1)
CPU_ERROR = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"


@pytest.fixture(scope="module")
def data():
    return digits()


class Above(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


def limited(model, r, limit, sizes=None, raise_error=None):
    """A criterion that runs out of memory in batches of more than `limit` images, after they are computed."""
    computed = build_criterion(model, r, "cpu")

    def criterion(x, y):
        if sizes is not None:
            sizes.append(len(x))
        loss = computed(x, y)
        if len(x) <= limit:
            return loss
        if raise_error is not None:
            raise raise_error
        return Above.apply(loss)

    return criterion


def message_of(r, data, limit, **options) -> str:
    """Message of the run's MemoryError. The model must be as before."""
    model = r.build()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(MemoryError) as caught:
        list(fit(model, data, r, device="cpu", criterion=limited(model, r, limit, **options)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


CASES = [
    (dict(batch_size=32), 16, "--set accumulate=2, which fits here (tried)"),
    (dict(batch_size=32), 5, "--set accumulate=8, which fits here (tried)"),
    (dict(batch_size=32, accumulate=2), 8, "--set accumulate=4, which"),
    (dict(batch_size=20), 5, "--set batch_size=5, which fits here (tried)"),
    (dict(batch_size=20, accumulate=2), 5, "--set batch_size=5 --set accumulate=1, which"),
    (dict(batch_size=32), 0, "nor 1 (tried)"),
]


@pytest.mark.parametrize("changes, limit, words", CASES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_fit_names_a_batch_that_fits(data, changes, limit, words, optimizer):
    sizes: list[int] = []
    r = tiny(optimizer=optimizer, **changes)
    message = message_of(r, data, limit, sizes=sizes)
    assert words in message and "8 pixels" in message
    fitting = [size for size in sizes if size <= limit]
    assert (len(fitting) > 0) == (limit > 0)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    RuntimeError(CPU_ERROR),
    MemoryError("Unable to allocate 3 GiB for an array"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_fit_tries_after_each_error_of_memory(data, error):
    message = message_of(tiny(batch_size=32), data, 16, raise_error=error)
    assert "--set accumulate=2, which fits here" in message


def test_fit_raises_other_errors_unchanged(data):
    r = tiny(batch_size=32)
    model = r.build()
    sizes: list[int] = []
    criterion = limited(model, r, 16, sizes, raise_error=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(fit(model, data, r, device="cpu", criterion=criterion))
    assert sizes == [32]


def test_named_accumulate_trains_the_same(data):
    r = replace(tiny(batch_size=32), drop_path=0.0, patch_drop=0.0, patch_drop_until=0.0)
    losses = [step.loss for step in fit(r.build(), data, r, device="cpu")]
    named = replace(r, accumulate=2)
    model = named.build()
    criterion = limited(model, named, 16)
    again = [step.loss for step in fit(model, data, named, device="cpu", criterion=criterion)]
    assert again == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("fails_at", [1, 3])
def test_trial_holds_the_optimizers_state_and_not_the_failed_step(
    data, monkeypatch, optimizer, fails_at
):
    """Also before the first step. The images of the failed step must be free when others are tried."""
    built = []
    monkeypatch.setattr(
        loop, "optimizers", lambda *a, build=loop.optimizers: built.append(build(*a)) or built[-1]
    )
    r = tiny(batch_size=32, optimizer=optimizer)
    model = r.build()
    computed = build_criterion(model, r, "cpu")
    failed, calls, trials = [], [], []

    def criterion(x, y):
        calls.append(len(x))
        loss = computed(x, y)
        if len(calls) < fails_at:
            return loss
        if not failed:
            failed.extend([weakref.ref(x), weakref.ref(loss)])
            return Above.apply(loss)
        states = [bool(o.state) for o in built[0]]
        trials.append((states, [r() is None for r in failed], model.training))
        return loss

    with pytest.raises(MemoryError, match="accumulate=2, which fits"):
        list(fit(model, data, r, device="cpu", criterion=criterion))
    assert len(trials) == 4, "two parts of the first and of the last step"
    for states, freed, training in trials:
        assert all(states) and all(freed) and training


def test_trial_computes_without_patch_dropout_too(data):
    """The last step has no patch dropout, and takes more memory than the first one."""
    r = tiny(batch_size=32)  # patch_drop = 0.5 in the first half of the steps
    model = r.build()
    computed = build_criterion(model, r, "cpu")

    def criterion(x, y):
        loss = computed(x, y)
        kept = 1 - model.patch_drop.prob
        return Above.apply(loss) if len(x) * kept > 8 else loss

    with pytest.raises(MemoryError, match="accumulate=4, which fits"):
        list(fit(model, data, r, device="cpu", criterion=criterion))


def test_fit_tries_after_a_failure_in_validation(data):
    r = tiny(batch_size=128, epochs=1)
    model = r.build()
    sizes = []

    def limit(_module, inputs):
        sizes.append(len(inputs[0]))
        if not model.training and len(inputs[0]) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(limit)
    with pytest.raises(MemoryError, match="accumulate=2, which fits"):
        list(fit(model, data, r, device="cpu"))
    assert model.training


@pytest.mark.slow
def test_trial_validates_too(data):
    """No smaller batch helps here, because at least 64 images are validated at once."""
    model = tiny(batch_size=128, epochs=1).build()

    def limit(_module, inputs):
        if not model.training and len(inputs[0]) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(limit)
    with pytest.raises(MemoryError, match=r"nor 1 \(tried\)"):
        list(fit(model, data, tiny(batch_size=128, epochs=1), device="cpu"))


def test_fit_tries_without_labels(data):
    r = replace(tiny(batch_size=32), patch_drop=0.0, patch_drop_until=0.0)
    model = r.build()
    objective = MaskedPatches(model, "mean-color", 0.5, r.mean, r.std)

    def limited_objective(model, x):
        loss = objective(model, x)
        return Above.apply(loss) if model.training and len(x) > 16 else loss

    with pytest.raises(MemoryError, match="accumulate=2, which fits"):
        list(fit(model, data, r, device="cpu", objective=limited_objective))


def test_trial_keeps_statistics_of_batch_norm():
    r = replace(tiny(), image_size=32, patch_drop=0.0, patch_drop_until=0.0)
    model = hybrid()
    computed = build_criterion(model, r, "cpu")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def criterion(x, y):
        if len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return computed(x, y)

    with pytest.raises(MemoryError, match="accumulate=2, which fits"):
        list(fit(model, digits(size=32), r, device="cpu", criterion=criterion))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_several_processes_try_nothing():
    r = tiny(batch_size=32)
    model = r.build()

    def refuse(_recipe, _step):
        raise AssertionError("the other processes wait")

    trial = MemoryTrial(
        model, {}, None, r, [], World(0, 2, torch.device("cpu")), refuse, images=256
    )
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught, trial.on_failure():
        raise error
    assert caught.value is error


def test_smaller_recipes_pass_the_check_of_length():
    for batch in (1, 2, 7, 12, 20, 64, 100):
        r = replace(recipe("digits"), batch_size=batch)
        at_once = [batch]
        for smaller in smaller_recipes(r):
            loop.check_length(1437, smaller, World(device=torch.device("cpu")))
            at_once.append(smaller.batch_size // smaller.accumulate)
        assert at_once == sorted(set(at_once), reverse=True) and at_once[-1] <= 2


def test_train_command_names_a_batch_that_fits(tmp_path, monkeypatch, capsys):
    from vitlens.train import runs

    words = ["train", "--recipe", "digits", "--data", "digits", "--tiny", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run"), "--watch", "0", "--set", "batch_size=32"]
    monkeypatch.setattr(
        runs, "build_criterion", lambda model, plan, device: limited(model, plan, 8)
    )

    def run(*more) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["vitlens", *words, *more])
        with pytest.raises(SystemExit) as stop:
            cli.run()
        return stop.value.code, capsys.readouterr().err

    code, printed = run()
    assert code == 2 and "--set accumulate=4, which fits here (tried)" in printed
    code, printed = run("--set", "accumulate=4")
    assert code == 0, printed
