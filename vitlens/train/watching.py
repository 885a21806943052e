"""What is seen of a run while it trains: progress bar, TensorBoard, snapshots; and signals that ask it to end."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import torch
from tqdm.auto import tqdm

from vitlens.train import snapshots
from vitlens.train.loop import Step


class Progress:
    """A bar in a terminal or a notebook with loss, accuracy, speed and the time left; `quiet` shows none."""

    def __init__(self, steps: int, quiet: bool):
        self.bar = tqdm(total=steps, unit="step", disable=quiet, mininterval=0.5 if sys.stderr.isatty() else 10)
        self.shown: dict[str, str] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def show(self, step: Step) -> None:
        if self.bar.n == 0:  # of a resumed run the bar begins where the run does, or its speed would be nonsense
            self.bar.initial = self.bar.n = self.bar.last_print_n = step.step - 1
        self.bar.update(step.step - self.bar.n)
        if step.loss is not None:
            best = {} if not step.metrics else {"top1": f"{max(step.metrics.values()):.2f}"}
            if "valid_loss" in step.metrics:
                best = {"valid_loss": f"{min(step.metrics.values()):.3f}"}
            self.shown |= {"loss": f"{step.loss:.3f}", "images/s": f"{step.images_per_second:.0f}", **best}
            self.bar.set_postfix(self.shown, refresh=False)


class Board:
    """TensorBoard's event file in `folder`; with None nothing is written. Needs the package tensorboard."""

    def __init__(self, folder: Path | None):
        self.folder, self.writer = folder, None
        if folder is not None:
            try:
                import torch.utils.tensorboard  # noqa: F401
            except ImportError:
                raise ValueError("Writing for TensorBoard needs its package: pip install tensorboard.") from None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_) -> None:
        if self.writer is not None:
            self.writer.close()

    def show(self, step: Step) -> None:
        if self.folder is not None and self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run wrote after its checkpoint is about to be written again.
            self.writer = SummaryWriter(str(self.folder), purge_step=step.step)
        if self.writer is not None and step.loss is not None:
            values = {"loss": step.loss, "lr": step.lr, "images_per_second": step.images_per_second, **step.metrics}
            for name, value in values.items():
                self.writer.add_scalar(name, value, step.step)


class Album:
    """Takes `count` snapshots of a run; what a model does not have is left out, and said once."""

    def __init__(self, out: Path, model: torch.nn.Module, probe: torch.Tensor, steps: int, count: int, say):
        self.path, self.model, self.probe, self.say = out / "snapshots.npz", model, probe, say
        self.due = set(snapshots.schedule(steps, count)) if count else set()

    def begin(self) -> None:
        """Take the first one, of untrained weights, in place of those of an earlier run."""
        if self.due:
            self.path.unlink(missing_ok=True)
            self.show(0)

    def show(self, step: int) -> None:
        if step not in self.due:
            return
        missing: list[str] = []
        try:
            snapshots.save(self.path, step, snapshots.record(self.model, self.probe, missing))
        except Exception as problem:  # a picture is no reason to lose a run
            self.say(f"There are no snapshots from step {step} on: {problem}")
            self.due.clear()
        for reason in missing if step == 0 else ():
            self.say(f"Not in the snapshots: {reason}")


class Stop:
    """Remembers a signal to end (Ctrl-C, SIGTERM), so that the run can end after the current step.

    A second Ctrl-C ends it at once. Does nothing outside of the main thread, which alone receives signals.
    """

    def __init__(self):
        self.signal = 0

    def __enter__(self) -> Stop:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
