"""Sentences of the explorer and its number formats. Pages without Python fill in the same table.

A sentence has named fields: `say("head", head=3)`. `number` and `percent` also exist in the scripts of a page.
"""

from __future__ import annotations

WORDS = {
    # parts of captions
    "mean": "mean of the heads",
    "max": "largest of the heads",
    "head": "head {head}",
    "readout": "the read-out ({readout})",
    "patch": "the patch in row {row}, column {column}",
    "token": "the {token}",
    "prefix": "the {count} prefix tokens",
    "averaged": "what {source} reads, averaged as it is read",
    "gated": ". A learned gate on the output of attention is not part of it",
    "not rescaled": "; not renormalized",
    # views of a layer
    "attention": "Attention from {source}, layer {layer}, {heads}",
    "attention prefix": ". {share} goes to {prefix}; the rest is not renormalized",
    "received": "Attention received, the mean over all queries, layer {layer}, {heads}",
    "rollout": "Rollout from {source} through layers 0 to {layer}, {heads}",
    "rollout prefix": ". {share} stays with {prefix}; the rest is not renormalized",
    "similarity": "Cosine similarity of the tokens after layer {layer} to {source}",
    "components": "First three principal components of the patch tokens after layer {layer} as red, green and blue, "
    "each from its least to its largest value. They hold {shares} of the variance of these patches",
    "norms": "Length of the patch tokens after layer {layer}; the median is {median}",
    "norms prefix": ", that of the {token} {length}",
    # the raw lens
    "lens": "Raw lens after layer {layer}: the {quantity} of “{name}” if the model ended here and read one patch "
    "alone, by its own final norm and head. {who} gives “{best}” ({score}). Early layers do not write for this head, "
    "so a raw lens may miss what they hold",
    "lens readout": "What the head reads ({readout})",
    "lens title": "{who}, layer by layer",
    "lens note": "The likeliest class after each layer, by the raw lens. A click goes to the layer.",
    "probability": "probability",
    "value": "value",
    # contributions
    "all layers": "All heads of all layers",
    "all heads": "All heads of layer {layer}",
    "one head": "Head {head} of layer {layer}",
    "minus": " minus that of “{name}”",
    "contributions": "{whose}: what the model takes from each patch here and writes directly into the logit of "
    "“{name}”{minus}, {patches} in all",
    "contributions prefix": ", and {share} from {prefix}",
    "contributions logit": ". The logit is {logit}. What goes through later layers is not in this map",
    "parts": "What each part adds to the logit",
    "parts difference": "What each part adds to the logit difference",
    "parts note": "The bars of heads, MLPs, embedding and biases add up to {logit}.",
    "embedding": "embedding",
    "pool": "MLP of the pool",
    "biases": "biases",
    # maps of a class
    "class": "“{name}” ({score})",
    "likeness": "similarity to “{name}”",
    "for": "{method} for {target}",
    "rather than": " rather than {target}",
    "why": "Why this class: {method}",
    "why similar": "Why similar: {method}",
    # units of maps
    "attention unit": "of the attention",
    "rollout unit": "of the rollout",
    "similarity unit": "cosine",
    "norms unit": "length",
    "contributions unit": "logits",
    # the panel of a map
    "range": " Patches have {low} to {high}.",
    "input": " The model's input has {height} × {width} pixels.",
    "cut": " No patch covers the last {pixels} pixels {where}.",
    "padded": " The last patches {where} reach {pixels} pixels beyond the image.",
    "bottom": "at the bottom",
    "right": "at the right",
    "squeezed": " The image is squeezed {times} times.",
    "look from": "the patch to look from",
    # questions, each with a line
    "question look": "Where does it look?",
    "line look": "Each square is a patch. Click one to see where it looks.",
    "question hold": "What has the patch become?",
    "line hold": "Each layer rewrites the tokens. Click a patch to find the patches that have become similar to it.",
    "question decide": "Which heads decide?",
    "line decide": "Each head adds to the class. Click a bar to see from which patches, and turn heads off to test it.",
    "question why": "Why this class?",
    "line why": "Six methods mark what speaks for the class. Where they disagree, at most one of them is right.",
    "six": "Six methods, and how far each is above random orders",
    "sigmas": "{sigmas} σ",
    "better": "Clearly better than chance",
    "no better": "No better than chance",
    "worse": "Worse than chance",
    # charts
    "distances": "All heads, mean attention distance in pixels",
    "mosaic": "All heads, from {source}",
    "mean row": "mean",
    "max row": "max",
    "trust": "How far to trust it",
    "scoring": "Covering and showing patches …",
    "unscored": "This page has no scores. `vitlens page --scores` computes them.",
    "too long": "Not scored, because it would take about {minutes} minutes. Use `vitlens explain`.",
    "score": "Patches are covered {baseline}. Areas: deletion {deletion} (low is good), insertion {insertion} (high is "
    "good). Insertion − deletion is {verdict}.",
    "above": "{sigmas} σ above {orders} random orders",
    "below": "{sigmas} σ below {orders} random orders",
    "equal": "equal for all orders",
    # targets
    "predicted": "the predicted class",
    "named": "{name} ({score})",
    "a class": "A class",
    "to a text": "Similarity to a text",
    "to an image": "Similarity to an image",
    "like a text": "like “{name}”",
    "like an image": "like {name}",
    "nothing": "–",
    # heads off
    "by mean": "their mean over {count} sample photographs",
    "by zero": "zero",
    "off": " Switched off: {heads}; it gives {way}.",
    "all off": " Switched off: {heads}; each gives {way}.",
    "head of": "head {head} of {layer}",
    "count of heads": "{count} heads",
    "layer": "layer {layer}",
    "the pool": "the pool",
    # pages without Python
    "page": "A saved page. Other photos and classes, slower methods and switched-off heads need `vitlens app`.",
    "live": "The model runs in this page. Photos stay on this machine: the page cannot send anything. Slower methods "
    "need `vitlens app`.",
    "running": "Running the model.",
    "no image": "Expected an image, but “{name}” is damaged or in a format that this browser does not read. Export it "
    "as JPEG or PNG.",
    "over white": "“{name}” was laid over white where it is transparent. ",
    "other levels": "“{name}” is no PNG of 8 bits or baseline JPEG without a color profile, so its levels may differ "
    "from those in Python. ",
    "not additive": "Contributions add up only if switched-off heads give zero, got their mean. Choose zero, or switch "
    "them on.",
    "left out": " Left out, so that the file stays below 30 MB: rollout and layers {layers}.",
    "no such value": "{name} has no value {value}.",
}  # fmt: skip
"""Sentences by name."""


def say(name: str, /, **fields: object) -> str:
    """A sentence of `WORDS` with its fields filled in."""
    return WORDS[name].format(**fields)


def number(value: float) -> str:
    """Three significant digits, with a proper minus sign."""
    return f"{value:.3g}".replace("-", "−")


def percent(share: float) -> str:
    """A share in percent, such as "12 %", or "< 0.5 %" for smaller ones."""
    return "< 0.5 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
