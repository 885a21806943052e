"""A second head for a trained class-token model: a linear classifier on the mean of its patch tokens, trunk frozen.

    python benchmarks/mean_pool_head.py data/checkpoints/vit_tiny_patch8_64 --data TINY_IMAGENET

Writes head.safetensors (weight, bias) and head.json (accuracy beside the class token's) into the folder mean_pool_head
in the model's: timm up to 1.0.28 opens no folder with two files of weights. Loaded into the same model built with
`global_pool="avg", fc_norm=False`, it shows what the read-out changes. Features of the flipped training images are used
as well.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from vitlens import data as datasets
from vitlens import load_model
from vitlens.train.precision import computes_bf16


@torch.no_grad()
def features(model, data, mean, std, flip: bool) -> torch.Tensor:
    """(N, D) the mean of the patch tokens after the final norm."""
    rows = []
    for images in data.images.split(500):
        x = (images.float() / 255 - mean) / std
        with torch.autocast(x.device.type, torch.bfloat16, enabled=computes_bf16(x.device)):
            tokens = model.forward_features(x.flip(-1) if flip else x)
        rows.append(tokens[:, model.num_prefix_tokens :].float().mean(1))
    return torch.cat(rows)


def top1(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * (logits.argmax(-1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, help="use this many training images only (for a quick try)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, help="another folder to write to")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options.model).to(device)
    config = model.pretrained_cfg
    size = config["input_size"][-1]
    train, valid = (datasets.load(options.data, split, size=size, on_damaged="skip") for split in ("train", "valid"))
    if options.images:
        train, valid = train.subset(options.images, 0), valid.subset(min(options.images, len(valid)), 0)
    train, valid = train.to(device), valid.to(device)
    mean, std = (torch.tensor(config[key], device=device).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = torch.cat([features(model, train, mean, std, flip) for flip in (False, True)])
    y = train.labels.repeat(2)
    x_valid = features(model, valid, mean, std, False)
    with torch.no_grad():
        class_token = torch.cat([model((i.float() / 255 - mean) / std) for i in valid.images.split(500)])

    head = torch.nn.Linear(x.shape[1], len(train.class_names)).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2, weight_decay=1e-3)
    steps = options.epochs * max(1, len(x) // 4096)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (4096,), device=device)
        F.cross_entropy(head(x[rows]), y[rows], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    out = options.out or options.model / "mean_pool_head"
    out.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half().cpu().contiguous() for name, value in head.state_dict().items()}
    save_file(state, out / "head.safetensors")
    with torch.no_grad():
        accuracy = top1(head(x_valid), valid.labels)
    record = {
        "command": f"python benchmarks/mean_pool_head.py {options.model} --data TINY_IMAGENET"
        + (f" --images {options.images}" if options.images else ""),
        "top1_mean_of_patches": round(accuracy, 2),
        "top1_class_token": round(top1(class_token, valid.labels), 2),
        "training_images": len(train),
        "seconds": round(time.perf_counter() - start, 1),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
        "date": str(datetime.date.today()),
    }
    (out / "head.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
