"""Compiled training that fails late: in the backward pass, in a later graph, or by an error of any kind."""

import warnings
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from support import digits, tiny
from test_processes import hybrid
from torch._dynamo.backends.common import aot_autograd

from vitlens.data.augment import augment_batch, draws
from vitlens.train import build_criterion, fit
from vitlens.train.criteria import OrUncompiled

torch.set_num_threads(1)
COMPILE = torch.compile


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture
def compile_with(monkeypatch):
    """Function that sets the backend of `torch.compile`, and starts without compiled graphs."""

    def set_backend(backend) -> None:
        torch._dynamo.reset()
        monkeypatch.setattr(
            torch,
            "compile",
            lambda f, *, mode, dynamic: COMPILE(f, backend=backend, dynamic=dynamic),
        )

    yield set_backend
    torch._dynamo.reset()


def late_backend(error: Exception, fails_at: int):
    """Backend that compiles all forward passes, and raises in the backward pass number `fails_at`, from 1.

    Returns the backend and the list of its backward passes.
    """
    backward_passes = []

    def forward(graph, _inputs):
        return make_boxed_func(graph.forward)

    def backward(graph, _inputs):
        backward_passes.append(graph)
        if len(backward_passes) == fails_at:
            raise error
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward), backward_passes


def run(model, r, data) -> tuple[list, list[str]]:
    """Losses and warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [step.loss for step in fit(model, data, r, device="cpu")]
    return losses, [str(w.message) for w in caught if "Compiling failed" in str(w.message)]


def batch_of(data, r):
    return augment_batch(
        data[0].images[:32], data[0].labels[:32], r.augment, draws("cpu", 0), mean=r.mean, std=r.std
    )


LATE = [
    (RuntimeError("no ptxas"), 1),
    (OSError("no gcc"), 1),
    (TypeError("launch() got 3 arguments"), 2),  # of the graph without patch dropout, in mid-run
]


@pytest.mark.slow
@pytest.mark.parametrize("error, fails_at", LATE, ids=str)
def test_fit_continues_uncompiled_if_the_backward_fails_to_compile(
    data, compile_with, error, fails_at
):
    r = tiny(compile="default", compile_cpu=True)
    off = r.build()
    expected, _ = run(off, replace(r, compile="off"), data)
    backend, backward_passes = late_backend(error, fails_at)
    compile_with(backend)
    model = r.build()
    losses, messages = run(model, r, data)
    assert len(backward_passes) == fails_at
    assert len(messages) == 1 and str(error) in messages[0]
    exact = fails_at == 1
    assert losses == (expected if exact else pytest.approx(expected, abs=1e-5))
    for name, value in model.state_dict().items():
        atol = 0 if exact else 1e-4
        torch.testing.assert_close(value, off.state_dict()[name], rtol=0, atol=atol)


@pytest.mark.slow
def test_fit_keeps_statistics_of_batch_norm_if_the_backward_fails_to_compile(compile_with):
    data = digits(size=32)
    r = replace(tiny(), image_size=32, patch_drop=0.0, patch_drop_until=0.0, steps=2, epochs=0)
    off = hybrid()
    expected, _ = run(off, r, data)
    for fails_at in (1, 0):  # 0: never, so that the first call is repeated compiled
        backend, _ = late_backend(RuntimeError("no ptxas"), fails_at)
        compile_with(backend)
        model = hybrid()
        losses, messages = run(model, replace(r, compile="default", compile_cpu=True), data)
        assert len(messages) == fails_at
        assert losses == pytest.approx(expected, abs=1e-5)
        for name, value in model.named_buffers():
            torch.testing.assert_close(value, off.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fails_at", [1, 0])
def test_criterion_in_a_loop_of_ones_own_has_one_set_of_draws(data, compile_with, fails_at):
    backend, _ = late_backend(RuntimeError("no ptxas"), fails_at)
    compile_with(backend)
    r = tiny(compile="default", compile_cpu=True)
    model, batch = r.build(), batch_of(data, r)
    model.patch_drop.prob = 0.5
    results = []
    for setting in ("off", "default"):
        criterion = build_criterion(model, replace(r, compile=setting), "cpu")
        model.zero_grad()
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = criterion(*batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((loss.detach(), gradient, torch.rand(4)))
    assert len([w for w in caught if "no ptxas" in str(w.message)]) == fails_at
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("Unable to allocate 3 GiB"),
        RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed."),
    ],
    ids=["device", "host", "worker"],
)
def test_compiled_raises_errors_that_are_not_the_compilers(error):
    calls = []

    def compiled(x):
        calls.append("compiled")
        raise error

    function = OrUncompiled(compiled, lambda x: calls.append("uncompiled"), "training continues")
    with pytest.raises(type(error)):
        function(torch.zeros(1))
    assert calls == ["compiled"]


def test_compiled_raises_errors_of_the_model_without_warning(compile_with):
    def function(x):
        return x @ torch.ones(3, 3)

    compile_with("eager")
    compiled = torch.compile(function, mode="default", dynamic=False)
    criterion = OrUncompiled(compiled, function, "training continues")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes"):
            criterion(torch.ones(2, 2))
        assert criterion(torch.ones(2, 3)).shape == (2, 3)
    assert not criterion.failed


@pytest.mark.slow
def test_fit_continues_uncompiled_without_a_working_cpp_compiler(data):
    r = tiny(compile="default", compile_cpu=True, steps=2, epochs=0)
    expected, _ = run(r.build(), replace(r, compile="off"), data)
    torch._dynamo.reset()
    broken = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    with torch._inductor.config.patch(broken):
        losses, messages = run(r.build(), r, data)
    assert losses == expected
    assert len(messages) == 1 and "no-such-compiler" in messages[0]
