"""Cost of `vitlens explain`: forwards and backwards of one image, counted by hooks, and seconds beside one forward.

    python -m experiments.explain_cost --out data/results/explain-cost.csv

For each model one row for the maps of the default methods and one for the maps and their scores (`report.score`). A
forward of a batch of n images counts n. A full backward begins at the output of the model; a partial one, of LeGrad,
leads from one layer's reading back to the attention of that layer. Random weights, which cost the same as others.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import timm
import torch

from experiments.results import about, command, parser, write
from vitlens import report
from vitlens.images import samples

MODELS = {"ViT-Ti/16": "vit_tiny_patch16_224", "ViT-B/16": "vit_base_patch16_224"}


def counted(model: torch.nn.Module, call: Callable[[], object]) -> tuple[object, float, Counter]:
    """The result of a call, its seconds, and its forwards of images, backwards and partial backwards."""
    counts, run = Counter(), torch.autograd._engine_run_backward

    def backward(outputs, gradients, retain, create, inputs, *args, **options):
        counts["backwards" if len(inputs) >= len(model.blocks) else "partial_backwards"] += 1
        return run(outputs, gradients, retain, create, inputs, *args, **options)

    hook = model.register_forward_pre_hook(
        lambda _, args: counts.update(image_forwards=len(args[0]))
    )
    with hook, mock.patch("torch.autograd._engine_run_backward", backward):
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start, counts


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = options.parse_args(arguments)
    rows, how = [], about(command("experiments.explain_cost", arguments))
    image = [("chelsea", samples()["chelsea"])]
    for name in options.models[:1] if options.tiny else options.models:
        torch.manual_seed(0)
        model = timm.create_model(MODELS[name], img_size=64 if options.tiny else 224).eval()

        def explain(model=model) -> list[report.Explanation]:
            return list(report.explain(model, image))

        (explanation,) = explain()  # warms up
        with torch.inference_mode():
            forward = statistics.median(
                counted(model, partial(model, explanation.input))[1] for _ in range(10)
            )

        def explain_and_score(model=model, explain=explain) -> list[report.Explanation]:
            return list(report.score(model, explain()))

        for what, call in (("maps", explain), ("maps and scores", explain_and_score)):
            (explanation,), seconds, counts = counted(model, call)
            scores = explanation.scores
            row = {
                "model": name,
                "pixels": explanation.grid.image[0],
                "what": what,
                "methods": len(explanation.maps),
            }
            for column in ("random_orders", "steps"):
                row[column] = 0 if scores is None else int(scores[column][0])
            row |= {
                part: counts[part] for part in ("image_forwards", "backwards", "partial_backwards")
            }
            row |= {"seconds": round(seconds, 2), "seconds_of_one_forward": round(forward, 4)}
            rows.append(row | {"in_forwards": round(seconds / forward, 1)} | how)
            print(row, flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
