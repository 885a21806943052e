"""Distance of class-specific maps of a model in bfloat16 from those in float32.

    python -m experiments.half_precision --model deit-tiny --data valid.parquet --out data/results/attribution-bf16.csv

Of every photograph, for the class that the model in float32 predicts. "model": parameters and pixels in bfloat16;
"autocast": `torch.autocast`. For each method the median, 95th percentile and largest over the photographs of the
relative difference in L2, of the largest difference of a patch and of the mean difference of all patches, the last two
relative to the largest value of the map in float32; and the median rank correlation of the patches.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from experiments.explanations import photographs
from experiments.results import about, command, parser, write
from vitlens import load_model
from vitlens.attribution import METHODS
from vitlens.models import preprocess

GRADIENT = ("relevance", "gradient_rollout", "legrad", "attention_gradient", "grad_cam")


def differences(low: Tensor, exact: Tensor) -> dict[str, float]:
    """Of two maps (rows, cols)."""
    error, peak = (low - exact).abs(), exact.abs().max()
    return {
        "l2": (error.norm() / exact.norm()).item(),
        "patch": (error.max() / peak).item(),
        "mean": (error.mean() / peak).item(),
        "correlation": spearmanr(low.flatten(), exact.flatten()).statistic,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="a timm name or a folder")
    options.add_argument("--data", type=Path, required=True, help="a Parquet file with a column of images")
    options = options.parse_args(arguments)
    model = load_model(options.model)
    half = copy.deepcopy(model).bfloat16()
    found: dict[tuple[str, str], list[dict]] = {(name, way): [] for name in GRADIENT for way in ("model", "autocast")}
    for encoded in tqdm(photographs(options.data)[: 2 if options.tiny else None]):
        x = preprocess(model, encoded)
        with torch.no_grad():
            target = model(x).argmax().item()
        for name in GRADIENT:
            exact = METHODS[name](model, x, target)[0]
            found[name, "model"].append(differences(METHODS[name](half, x, target)[0], exact))
            with torch.autocast("cpu", torch.bfloat16):
                found[name, "autocast"].append(differences(METHODS[name](model, x, target)[0].float(), exact))
    how, rows = about(command("experiments.half_precision", arguments)), []
    for (name, way), each in found.items():
        values = {measure: torch.tensor([d[measure] for d in each], dtype=torch.float64) for measure in each[0]}
        row = {"method": name, "bfloat16": way, "photographs": len(each)}
        for measure in ("l2", "patch", "mean"):
            marks = torch.quantile(values[measure], torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64)).tolist()
            row |= {f"{measure}_{mark}": f"{v:.4f}" for mark, v in zip(("median", "95", "largest"), marks, strict=True)}
        rows.append(row | {"correlation_median": f"{values['correlation'].median():.4f}"} | how)
    write(options.out, rows)


if __name__ == "__main__":
    main()
