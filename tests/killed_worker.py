"""A training whose worker is killed: `python killed_worker.py OUT`, in a process of its own.

PyTorch raises the loss of a worker at any moment, also after the training has ended with an error. In the process of
the tests that would end another test.
"""

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitlens.data import ImageStream, Samples, load
from vitlens.data.imageset import Fitting
from vitlens.train import fit, recipe


@dataclass(frozen=True)
class Fatal:
    """Digits, one of which kills the worker that reads it for the second time, unless a file exists."""

    images: torch.Tensor
    spared: Path

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        in_worker = torch.utils.data.get_worker_info() is not None
        if i == 200 and in_worker and not self.spared.exists():
            read = self.spared.with_name("read")
            if read.exists():  # in the second epoch, after some steps
                os.kill(os.getpid(), signal.SIGKILL)
            read.touch()
        return self.images[i]


def weights(out: Path) -> list[torch.Tensor]:
    """Weights after a training in `out`, which is continued. Its worker lives if the file `spared` is beside `out`."""
    digits, valid = load("digits").subset(256), load("digits", "valid").subset(40)
    plan = recipe("digits").tiny()
    # The loss may come amid an update, so each step is saved.
    plan = replace(plan, augment=replace(plan.augment, scale=(0.5, 1.0)), save_every=1e-9)
    fatal = Fatal(digits.images, out.with_name("spared"))
    samples = Samples(fatal, digits.labels, digits.class_names, range(256))
    stream = ImageStream(samples, 8, Fitting(8), workers=1)
    model = plan.build()
    for _ in fit(model, (stream, valid), plan, device="cpu", out=out, resume=True):
        pass
    return [p.detach().clone() for p in model.parameters()]


if __name__ == "__main__":
    try:
        weights(Path(sys.argv[1]))
    except ChildProcessError as problem:
        sys.exit(str(problem))
