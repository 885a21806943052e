"""Trust in maps on many photographs: insertion and deletion of every method, and the cost of a map.

    python -m experiments.explanations --model deit-tiny --data valid.parquet --out data/results/explanations.csv

Every photograph is explained for the class that the model predicts, by all of `vitlens.attribution`, plain rollout and
random orders, and scored by `vitlens.faithfulness.table`. The table has one row for each method: the mean over the
photographs of deletion (low is good), insertion and insertion − deletion, each with the half width of its 95 % interval
(Student's t), the same for its difference from plain rollout and from the random orders of the same photograph, the
mean rank, and the share of photographs in which it exceeds the random orders by more than two of their standard
deviations. Then the cost, in a separate process for each method: seconds for one map, the best of three, the same in
forwards of the model, and the peak memory of the map beyond that of a forward (Linux only).

Scores are written to --rows after each photograph, and the same command continues an interrupted run. --only scores
single methods, on as many photographs with the same step and baseline, and puts their rows into the existing table,
without ranks and without differences from methods that are not scored.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import torch
from tqdm import tqdm

from experiments.results import about, command, in_own_process, kept, memory, parser, rounded, write
from vitlens import faithfulness, load_model
from vitlens.attribution import METHODS
from vitlens.models import preprocess
from vitlens.scores import student

STEP, ORDERS, BASELINE = 14, 4, "mean"
NAMES = tuple(METHODS)


def scored(model, encoded: bytes, number: int, only: list[str]) -> pd.DataFrame:
    """One row for each method and one for the mean of random orders, of one photograph; or rows of single methods."""
    x = preprocess(model, encoded)
    with torch.inference_mode():
        probability, target = (part.item() for part in model(x).softmax(-1).max(-1))
    maps = {
        name: method(model, x, target)
        for name, method in METHODS.items()
        if not only or name in only
    }
    if only:
        found = faithfulness.curves(
            model, x, torch.stack([*maps.values()]), target, step=STEP, baseline=BASELINE
        )
        areas = {"deletion": found.deletion_area[:, 0], "insertion": found.insertion_area[:, 0]}
        rows = pd.DataFrame(
            {"method": list(maps), **{name: area.double().numpy() for name, area in areas.items()}}
        )
        rows["difference"] = rows.insertion - rows.deletion
        return rows.assign(image=number, target=target, probability=probability)
    found = faithfulness.table(
        model, x, maps, target, orders=ORDERS, step=STEP, baseline=BASELINE, seed=number
    )
    chance = {
        name: found[f"random_{name}_mean"][0] for name in ("deletion", "insertion", "difference")
    }
    found = pd.concat([found, pd.DataFrame([{"method": "random mean"} | chance])])
    return found.assign(image=number, target=target, probability=probability)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each method, and one for random orders where they were scored."""
    by_image = rows.pivot(index="image", columns="method")
    difference, found = by_image["difference"], []
    for name in (*NAMES, "random mean"):
        if name not in difference:
            continue
        row = {"method": name.removesuffix(" mean")}
        for score in ("deletion", "insertion", "difference"):
            values = by_image[score][name]
            row |= {score: values.mean(), f"{score}_95": student(values)}
        for label, other in (("rollout", "rollout"), ("random", "random mean")):
            if other in difference:
                above = difference[name] - difference[other]
                row |= {f"above_{label}": above.mean(), f"above_{label}_95": student(above)}
        if name in NAMES and "rank" in rows:
            row |= {
                "mean_rank": by_image["rank"][name].mean(),
                "clear_of_random": (by_image["difference_z_score"][name] > 2).mean(),
            }
        found.append(row)
    return pd.DataFrame(found)


def measured(model_name: str, data: Path, name: str) -> dict[str, float]:
    """Seconds and forwards of one map and its peak memory in MiB. Runs in a separate process."""
    model = load_model(model_name)
    x = preprocess(model, photographs(data)[0])
    method = METHODS[name]

    def best(function, times: int) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
        return min(taken)

    def one() -> None:
        method(model, x, 0)

    with torch.inference_mode():
        forward = best(lambda: model(x), 20)
    one()
    seconds, peak = memory(lambda: best(one, 3))
    return {"seconds": seconds, "forwards": seconds / forward, "peak_mib": peak}


def cost(*case) -> dict:
    """Time and memory of one map. Memory is measured where whatever is freed goes back to the system at once."""
    timed = in_own_process(measured, *case)
    returning = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    os.environ.update(returning)
    freeing = in_own_process(measured, *case)
    for name in returning:
        del os.environ[name]
    return timed | {"peak_mib": freeing["peak_mib"]}


def photographs(data: Path) -> list[bytes]:
    return [image["bytes"] for image in pyarrow.parquet.read_table(data)["image"].to_pylist()]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--model", required=True, help="a timm name, or a folder in timm's hub layout"
    )
    options.add_argument(
        "--data", type=Path, required=True, help="Parquet file with a column image"
    )
    options.add_argument(
        "--rows", type=Path, default=Path("explanations-rows.csv"), help="CSV to continue"
    )
    options.add_argument("--images", type=int, default=200)
    options.add_argument(
        "--only", nargs="+", choices=NAMES, default=[], help="single methods to score"
    )
    options = options.parse_args(arguments)
    model, sources = (
        load_model(options.model),
        photographs(options.data)[: 2 if options.tiny else options.images],
    )
    how = {
        "images": len(sources),
        "step": STEP,
        "orders": 0 if options.only else ORDERS,
        "baseline": BASELINE,
    }
    how |= about(command("experiments.explanations", arguments))
    records = kept(
        options.out, options.only, {name: how[name] for name in ("images", "step", "baseline")}
    )
    done = set(pd.read_csv(options.rows)["image"]) if options.rows.exists() else set()
    for number in tqdm([k for k in range(len(sources)) if k not in done]):
        rows = scored(model, sources[number], number, options.only)
        rows.to_csv(
            options.rows,
            mode="a",
            header=not options.rows.exists(),
            index=False,
            float_format="%.6g",
        )
    rows = pd.read_csv(options.rows)
    for row in summary(rows).to_dict("records"):
        if row["method"] == "relevance" or (row["method"] in NAMES and not options.tiny):
            row |= cost(options.model, options.data, row["method"])
        records.append(rounded(row, lambda v: round(v, 4)) | how)
        print(records[-1])
    records.sort(key=lambda row: -float(row["difference"]))
    write(options.out, records)


if __name__ == "__main__":
    main()
