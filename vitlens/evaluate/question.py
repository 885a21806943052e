"""What is asked of an evaluation, checked once, and what all protocols need to answer it."""

from __future__ import annotations

import datetime
import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.data import ImageStream
from vitlens.evaluate.reading import Reading, lost_classes, opened, read
from vitlens.evaluate.registry import OPTIONS, PROTOCOLS
from vitlens.evaluate.scores import Score
from vitlens.models import load_model
from vitlens.paper.records import Record
from vitlens.recorder.supported import short_name, states_preprocessing, unwrap
from vitlens.train import World, join
from vitlens.train.runs import versions


@dataclass(frozen=True)
class Question:
    """Everything that an evaluation depends on. Raises ValueError for settings that do not go together, and TypeError
    for a model that is neither a module nor a name."""

    model: str | Path | nn.Module
    """A timm name, a folder, or a timm model, which stays on its device unless `device` is given."""
    data: str = ""
    """What `data.load` reads; nothing for the protocol vtab."""
    protocol: str = "top1"
    """A name of `PROTOCOLS`."""
    shots: tuple[int, ...] = ()
    """For fewshot, images of each class: 1, 5, 10 and 25 by default."""
    seeds: int | None = None
    """Number of seeds, from 0 up: three by default for fewshot, one for fine-tuning."""
    neighbors: int | None = None
    """For knn: 20 by default."""
    tasks: tuple[str, ...] = ()
    """For vtab: all 19 by default."""
    recipe: str = ""
    """For fine-tuning: the data's own by default."""
    overrides: tuple[str, ...] = ()
    """Changes to the recipe, "key=value"."""
    runs: Path = Path("runs")
    """Where fine-tuning keeps its runs, each in a folder of its model, data, recipe and seed."""
    root: Path | None = None
    workers: int | None = None
    device: str | None = None
    command: str = ""
    say: Callable[[str], None] = print
    """Called with notes about the data and with the damaged images."""

    def __post_init__(self):
        if not isinstance(self.model, str | Path | nn.Module):
            raise TypeError(f"Expected a timm name, a folder or a model to evaluate, got {type(self.model).__name__}.")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"There is no protocol {self.protocol!r}. The protocols are {', '.join(PROTOCOLS)}.")
        reads = PROTOCOLS[self.protocol].reads
        for option, field in OPTIONS.items():
            if getattr(self, field) and option not in reads:
                others = ", ".join(sorted(each.name for each in PROTOCOLS.values() if option in each.reads))
                raise ValueError(
                    f"The protocol {self.protocol} does not read --{option}, which is for {others}. Leave it out, or "
                    "choose another --protocol."
                )
        if "data" in reads and not self.data:
            raise ValueError("The images to measure on are missing: name a data set or a folder with --data.")
        for option in ("seeds", "neighbors"):
            if getattr(self, option) is not None and getattr(self, option) < 1:
                raise ValueError(f"--{option} must be 1 or more; got {getattr(self, option)}.")
        if isinstance(self.model, nn.Module) and "recipe" in reads:
            raise ValueError(
                f"The protocol {self.protocol} starts from a timm name or a folder; got {type(self.model).__name__}. "
                "Save it with timm.models.save_for_hf and give the folder."
            )

    @cached_property
    def world(self) -> World:
        """The processes that share the images."""
        device = self.device
        if device is None and isinstance(self.model, nn.Module):
            device = next(self.model.parameters()).device
        return join(device)

    @cached_property
    def network(self) -> nn.Module:
        """The model, opened, on its device."""
        model = unwrap(self.model) if isinstance(self.model, nn.Module) else load_model(self.model)
        if not states_preprocessing(model):
            raise ValueError(f"Evaluation takes models that tell how images are normalized, as timm's `pretrained_cfg` "
                             f"does; {type(model).__name__} does not.")  # fmt: skip
        return model.to(self.world.device)

    @property
    def name(self) -> str:
        """What the model is called in records: its timm name, its folder's name, or its architecture."""
        if isinstance(self.model, nn.Module):
            return short_name(self.network)
        return short(str(self.model))

    @cached_property
    def weights(self) -> str:
        """The first digits of the SHA-256 of all weights and buffers, as `Record.weights`."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:12]

    @property
    def manner(self) -> str | None:
        """The recipe and the changes to it; None for the data's own, unchanged."""
        recipe = short(self.recipe)
        if Path(self.recipe).is_file():
            recipe += f" ({hashlib.sha256(Path(self.recipe).read_bytes()).hexdigest()[:8]})"
        return ", ".join((*filter(None, [recipe]), *map(_short_value, self.overrides))) or None

    @cached_property
    def failures(self) -> list[str]:
        """Problems for which the command ends with exit code 1 despite its results, such as a damaged class."""
        return []

    def images(self, split: str) -> ImageStream:
        """A split of the data, as the model wants to be shown it; says what there is to note about it."""
        found = opened(self.network, self.data, split, root=self.root, workers=self.workers, world=self.world)
        self.note(found.note)
        return found

    def read(self, images: ImageStream, output: Callable[[Tensor], Tensor], what: str) -> Reading:
        """What `output` makes of all images (`reading.read`); damaged ones are said. `what`: the bar's name."""
        found = read(self.network, images, output, world=self.world, progress=what)
        self.left_out(found.damaged)
        return found

    def note(self, text: str) -> None:
        """Say it, if there is something to say, once for all processes."""
        if text and self.world.rank == 0:
            self.say(text)

    def left_out(self, damaged: Sequence[str]) -> None:
        """Say which images are damaged."""
        for reason in damaged:
            self.note(f"Left out: {reason}.")

    def fail(self, sentence: str) -> str:
        """Say the sentence and keep it in `failures`, unless it is ""; returns it."""
        self.note(sentence)
        self.failures.extend(filter(None, [sentence]))
        return sentence

    def whole(self, images: ImageStream, found: Reading) -> str:
        """Fail with the classes of which every image is damaged; returns the sentence, or "" if there are none."""
        return self.fail(lost_classes(images, found))

    def place(self, data: str) -> str:
        """The first digits of the SHA-256 of the folders of the data, as `Record.place`; "" for named data."""
        found = [str(Path(each).resolve()) for each in (data, self.root) if each and Path(each).exists()]
        return hashlib.sha256(" ".join(found).encode()).hexdigest()[:8] if found else ""

    def folder(self, data: str) -> Path:
        """Where the runs of fine-tuning on `data` lie."""
        name = "-".join(filter(None, (short(data), self.place(data))))
        return self.runs / _file(f"{self.name}-{self.weights}") / _file(", ".join(filter(None, (name, self.manner))))

    def record(
        self, data: str, metric: str, score: Score, images: int, damaged: Sequence[str], notes=(), **more
    ) -> Record:
        """The record of a score on so many images of `data`."""
        return Record(
            self.name, short(data), self.protocol, metric, *(round(x, 4) for x in score), images,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), versions(), len(damaged),
            self.command, self.weights, self.place(data), note=" ".join(filter(None, notes)) or None, **more,
        )  # fmt: skip


def short(name: str) -> str:
    """A path without its folders, but for a model's run: results should not reveal local paths."""
    if not name or not (Path(name).exists() or Path(name).is_absolute()):  # Path("") is the current folder
        return name
    path = Path(name).resolve()
    return f"{path.parent.name}/model" if path.name == "model" else path.name


def command_of(arguments: Sequence[str]) -> str:
    """The vitlens command with these arguments, local paths shortened."""
    return shlex.join(["vitlens", *map(_short_value, arguments)])


def _short_value(argument: str) -> str:
    """`--option=value` or `key=value` with a short value."""
    key, equals, value = argument.rpartition("=")
    return key + equals + short(value) if re.fullmatch(r"[-\w.=]+", key) else short(argument)


def _file(name: str) -> str:
    """A name for a folder, the same for the same text."""
    plain = re.sub(r"[^\w.,=+-]+", "-", name)
    return plain if len(plain) < 100 else f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
