"""Calls that users type first, and the answer to each, a result or one sentence.

`python -m tests.guesses` prints them.
"""

import ast
import contextlib
import json
import os
import tempfile
import traceback
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import vitlens
import vitlens_explorer
import vitlens_paper.evaluate

GUESSES = (
    # statistics and captures
    ("vitlens.widgets.explore(model)", "import vitlens_explorer"),
    ("vitlens.evaluate.proportion(1, 2)", "from vitlens_paper import evaluate"),
    # names in the wrong place
    ("vitlens.inspect(model, cat)", "Did you mean vitlens.report.inspect?"),
    ("vitlens.explain", "Did you mean vitlens.report.explain?"),
    ("vitlens.gradcam", "Did you mean vitlens.attribution.grad_cam?"),
    ("vitlens.show(cat)", "Did you mean vitlens.overlay?"),
    ("vitlens.rollout", "vitlens.attention.rollout, vitlens.attribution.rollout?"),
    ("vitlens.explore", "Did you mean vitlens_explorer.explore?"),
    ("vitlens.table_2", "Did you mean vitlens_paper.table_2"),
    ("vitlens.ImageSet", "Did you mean vitlens.data.ImageSet?"),
    ("vitlens.logit_lens", "Did you mean vitlens.stream.lens?"),
    ("vitlens.atention", "Did you mean attention"),
    ("vitlens.inspekt", "vitlens.report.inspect"),
    ("vitlens.xyzzy", "`dir(vitlens)`"),
    ("report.grad_cam", "Did you mean vitlens.attribution.grad_cam?"),
    ("report.inspekt", "Did you mean inspect"),
    ("vitlens_explorer.load_model", "Did you mean vitlens.load_model?"),
    ("vitlens_explorer.explor", "Did you mean explore?"),
    ("vitlens_paper.inspect", "Did you mean vitlens.report.inspect?"),
    ("__import__('vitlens', fromlist=['inspect'])", "Did you mean vitlens.report.inspect?"),
    ("vitlens.run(model, 'cat.jpg')", "preprocess"),
    ("attention.rollout(model, images)", "takes a capture"),
    ("attention.summary(model, images)", "takes a capture"),
    ("attention.mean_distance(images)", "takes a capture"),
    ("attention.entropy(attn[0])", "takes a capture"),
    (
        "attention.summary(attn, 'distance')",
        "Did you mean mean_distance? It must be one of mean_distance",
    ),
    ("attention.summary(attn).to_pandas()", "works"),
    ("attention.summary(attn).variance", "no statistic"),
    ("attention.mean_over(mine, [images])", "works"),
    ("attention.mean_over(model, images)", "shape (B, C"),
    ("attention.mean_over(model, [])", "no batch"),
    ("attention.rollout(attn, query=(20, 3))", "outside"),
    ("attention.rollout(attn, head_fusion='median')", "must be one of mean, max, min"),
    ("attn[5].weights(head=2, query=(3, 4))", "works"),
    ("attn[5].weights(head=7)", "heads 0 to 2"),
    ("attn[5, 2]", "weights(head="),
    ("attn[99]", "0 to 11"),
    ("attn.weights()", "layers"),
    ("attn.shape", "no attribute"),
    ("before()", "forward"),
    ("capture('vit_tiny_patch16_224').__enter__()", "Expected a torch.nn.Module"),
    ("capture(mine).__enter__()", "works"),
    (
        "capture(torch.nn.Sequential(mine, vitlens.load_model())).__enter__()",
        "2 Vision Transformers",
    ),
    ("capture(torch.nn.Linear(3, 3)).__enter__()", "register_model"),
    ("intervene(mine, heads={(0, 2): 'zero'}).__enter__()", "works"),
    ("intervene(model, heads=[(0, 2)]).__enter__()", "mapping"),
    ("intervene(model, heads={(0, 2): 'mean'}).__enter__()", "reference"),
    ("intervene(model, heads={3: 'zero'}).__enter__()", "(layer, head)"),
    (
        "intervene(model, heads={(0, 2): 'noise'}).__enter__()",
        "not a tensor must be one of zero, mean",
    ),
    ("intervene(model, heads={(0, 9): 'zero'}).__enter__()", "3 heads"),
    # maps
    ("attribution.relevance(mine, images, 'tabby')", "works"),
    ("attribution.relevance(model, images, target='TABBY')", "works"),
    ("attribution.relevance(model, images, target='cat')", "no class"),
    ("attribution.relevance(model, images, target=5000)", "0 to 999"),
    ("attribution.relevance(model, images, target=1.5)", "number or name"),
    ("attribution.relevance(model, images, target=[1, 2, 3])", "each of 2 images"),
    ("attribution.relevance(model, cat)", "preprocess"),
    ("attribution.relevance(model, 'cat.jpg')", "preprocess"),
    ("attribution.relevance(model, images[0])", "shape (B, C"),
    ("attribution.relevance(model, (images * 50).byte())", "floating-point"),
    ("attribution.relevance(model, images.numpy())", "tensor"),
    ("attribution.relevance(model, torch.zeros(1, 3, 256, 256))", "does not take this size"),
    ("attribution.relevance(model.train(), images)", "works"),
    ("attribution.relevance(attn)", "gradients=True"),
    ("attribution.methods(['gradcam'])", "grad_cam"),
    ("attribution.gradcam(model, images)", "grad_cam"),
    # models and images
    ("vitlens.load_model('vit_tiny_patch16_244', pretrained=False)", "vit_tiny_patch16_224"),
    ("vitlens.load_model('vit_b_16')", "torchvision:vit_b_16"),
    ("vitlens.load_model('facebook/dinov2-small')", "hf:facebook/dinov2-small"),
    ("vitlens.load_model('photos')", "config.json"),
    ("vitlens.load_model('cat.jpg')", "cat.jpg"),
    ("vitlens.load_image('dog.jpg')", "dog.jpg"),
    ("vitlens.load_image('photos')", "irectory"),
    ("vitlens.preprocess(mine, cat)", "works"),
    ("vitlens.preprocess(model, 'cat.jpg')", "works"),
    ("vitlens.preprocess(model, ['cat.jpg', 'photos/cat.jpg'])", "works"),
    ("vitlens.preprocess(model, vitlens.samples())", "works"),
    ("vitlens.preprocess(model, images)", "one image"),
    ("vitlens.preprocess(cat, model)", "Expected a torch.nn.Module"),
    ("vitlens.restore(model, images[0])", "(B, 3, H, W)"),
    ("vitlens.top_classes(model, images)", "logits"),
    ("vitlens.top_classes(model, logits[0])", "logits"),
    ("vitlens.models.label_names(model)", "works"),
    ("vitlens_explorer.explore", "works"),
    # features and figures
    ("tokens.features(mine, images)", "works"),
    ("tokens.features(model, cat)", "preprocess"),
    ("stream.lens(mine, images)", "works"),
    ("stream.lens(model, images, layer=12)", "0 to 11"),
    ("filters.principal(mine)", "works"),
    ("positions.similarity(mine)", "works"),
    ("positions.similarity(attn)", "Expected a torch.nn.Module"),
    ("plot.filters(filters.principal(model))", "works"),
    ("plot.attention_distance(attention.summary(attn).mean_distance)", "works"),
    ("vitlens.overlay(cat, attention.rollout(attn)[0])", "model="),
    ("vitlens.overlay(cat, attention.rollout(attn)[0], model=model)", "works"),
    ("vitlens.overlay(vitlens.restore(model, images)[0], attention.rollout(attn)[0])", "works"),
    ("plot.training('run')", "works"),
    ("plot.training('run/log.jsonl')", "works"),
    ("plot.attention_distance(attn)", "got Attention"),
    ("plot.position_similarity(model)", "got VisionTransformer"),
    ("plot.inspected(report.inspect(model, vitlens.samples()))", "works"),
    ("report.inspect(model, images)", "by their names"),
    ("vitlens_explorer.training('run')", "works"),
    ("vitlens_explorer.training('run/snapshots.npz')", "works"),
    ("vitlens_explorer.training('elsewhere')", "no snapshots"),
)
"""Python code, and "works" or a word of the sentence."""


def answer(code: str, names: dict) -> str:
    """ "works", the sentence of an error that vitlens raises, or "RAW" and an error raised elsewhere."""
    try:
        value = eval(code, names)
        if isinstance(value, contextlib.AbstractContextManager):
            value.__exit__(None, None, None)
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        written = last.filename.startswith(str(Path(vitlens.__file__).parent)) and any(
            isinstance(node, ast.Raise) and node.lineno <= last.lineno <= node.end_lineno
            for node in ast.walk(ast.parse(Path(last.filename).read_text(encoding="utf-8")))
        )
        return f"{'' if written else 'RAW '}{type(error).__name__}: {error}"
    return "works"


def namespace() -> dict:
    """The names that guesses use, and in the working directory a picture, a folder and the directory of a run."""
    model = vitlens.load_model()
    pictures = vitlens.samples()
    images = vitlens.preprocess(model, [pictures["chelsea"], pictures["rocket"]])
    with torch.no_grad(), vitlens.capture(model) as attn:
        logits = model(images)

    def before():
        with vitlens.capture(model) as early:
            return early[0]

    Path("photos").mkdir()
    for path in ("cat.jpg", "photos/cat.jpg"):
        pictures["chelsea"].save(path)
    vitlens.train.snapshots.save(
        "run/snapshots.npz", 0, vitlens.train.snapshots.record(model, images)
    )
    Path("run/log.jsonl").write_text(
        json.dumps({"step": 1, "steps": 2, "loss": 0.5, "rate": 1.0}) + "\n"
    )
    modules = {name: getattr(vitlens, name) for name in vitlens.__all__}
    modules |= {"vitlens_explorer": vitlens_explorer, "vitlens_paper": vitlens_paper}
    modules |= {
        "widgets": vitlens_explorer,
        "paper": vitlens_paper,
        "evaluate": vitlens_paper.evaluate,
    }
    return modules | {
        "vitlens": vitlens,
        "torch": torch,
        "np": np,
        "model": model,
        "mine": torch.nn.Sequential(model),
        "cat": pictures["chelsea"],
        "images": images,
        "attn": attn,
        "logits": logits,
        "before": before,
    }


def answers() -> list[tuple[str, str, str]]:
    """(code, expected, answer) of every guess."""
    with tempfile.TemporaryDirectory() as folder:
        home = os.getcwd()
        os.chdir(folder)
        try:
            names = namespace()
            return [(code, expected, answer(code, names)) for code, expected in GUESSES]
        finally:
            os.chdir(home)
            plt.close("all")


if __name__ == "__main__":
    for code, expected, got in answers():
        right = got == expected == "works" or expected in got and not got.startswith("RAW")
        print(f"{'  ' if right else '! '}{code}\n      {got[:300]}")
