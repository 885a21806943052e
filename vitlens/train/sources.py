"""The images of a run: opened alike in every process, and alike again when it is resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitlens.data import ImageSet, ImageStream, load
from vitlens.data.files import write
from vitlens.train.processes import World
from vitlens.train.settings import Recipe


@dataclass(frozen=True)
class Source:
    """Where images come from: the arguments of `data.load` but the split and what the recipe says."""

    data: str
    root: str | Path | None = None
    stream: bool | None = None
    workers: int | None = None
    on_damaged: str = "raise"

    def opened(self, plan: Recipe, out: Path, resume: bool, world: World) -> list[ImageSet | ImageStream]:
        """The training and the validation split.

        Whether a split is held or streamed depends on free memory, and a stream cuts other crops. So the first process
        chooses (and fetches what is missing) while the others wait; `note` keeps the choice for resuming.
        """
        sizes = {"train": plan.resize or plan.image_size, "valid": plan.image_size}
        choice, splits = dict.fromkeys(sizes, self.stream), {}

        def open_splits() -> None:
            for split, size in sizes.items():
                splits[split] = load(
                    self.data, split, size=size, squash=plan.squash, on_damaged=self.on_damaged, root=self.root,
                    stream=choice[split], workers=self.workers, device=world.device,
                )  # fmt: skip

        if resume and self.stream is None and (out / "data.json").exists():
            choice = _noted(out / "data.json")
        if world.rank == 0:
            open_splits()
        for split in sizes:
            choice[split] = bool(world.first(isinstance(splits.get(split), ImageStream)))
        if world.rank > 0:
            open_splits()
        return list(splits.values())


def note(out: Path, splits: list[ImageSet | ImageStream]) -> None:
    """Keep for a resumption which of the splits are streamed."""
    content = {"stream": [isinstance(split, ImageStream) for split in splits]}
    write(out / "data.json", json.dumps(content).encode())


def _noted(path: Path) -> dict[str, bool]:
    try:
        train, valid = json.loads(path.read_text(encoding="utf-8"))["stream"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"{path} is damaged: it should say whether training and validation images were streamed. Resume with "
            "--stream or --hold, as the run was started."
        ) from problem
    return {"train": bool(train), "valid": bool(valid)}
