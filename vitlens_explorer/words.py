"""Sentences of the explorer and its number formats. Pages without Python fill in the same table.

A sentence has named fields: `say("head", head=3)`. `number` and `percent` also exist in the scripts of a page.
"""

from __future__ import annotations

from vitlens.formatting import PREDICTION
from vitlens.formatting import number as number

WORDS = {
    # the prediction, beside an explained class
    **PREDICTION,
    # parts of captions
    "mean": "mean over heads",
    "max": "max over heads",
    "head": "head {head}",
    "readout": "{readout} (read-out)",
    "patch": "the patch in row {row}, column {column}",
    "token": "the {token}",
    "prefix": "the {count} prefix tokens",
    "averaged": "the tokens that the head reads, averaged ({source})",
    "gated": ". A learned gate on the output of attention is not included",
    "not rescaled": ". Not rescaled",
    # views of a layer
    "attention": "Attention from {source}, layer {layer}, {heads}",
    "attention prefix": ". {share} of the attention goes to {prefix}; the map shows the remaining {rest}, not rescaled",
    "received": "Attention that each patch receives, averaged over queries, layer {layer}, {heads}",
    "rollout": "Rollout from {source} through layers 0 to {layer}, {heads}",
    "rollout prefix": ". {share} stays with {prefix}; the map shows the remaining {rest}, not rescaled",
    "similarity": "Cosine similarity of the tokens after layer {layer} to {source}",
    "components": "First three principal components of the patch tokens after layer {layer} as red, green and blue, "
    "each scaled from its minimum to its maximum. They explain {shares} of the variance across patches",
    "norms": "Norm of the patch tokens after layer {layer}: median {median}",
    "norms prefix": "; {token} {length}",
    # the same views in plain words
    "plain mean": "In layer {layer}, with its heads averaged",
    "plain max": "In layer {layer}, with the largest weight of any head",
    "plain head": "In head {head} of layer {layer}",
    "plain patch": "the framed patch (the query)",
    "plain summary": "the summary token (class token)",
    "plain token": "the {token}",
    "plain likeness": "the {target}",
    "plain place": "row {row}, column {column}",
    "plain itself": "itself",
    "plain attention": "{where}, {who} looks most at {place}: {share} of its attention, where even would be {even}.",
    "plain received": "{where}, tokens look most at {place}: on average {share} of their attention, where even would "
    "be {even}.",
    "plain rollout": "An estimate through layers 0 to {layer}: {who} takes most from {place}, {share}, where even "
    "would be {even}. Each layer counts a token half as its own, so early maps show little else.",
    "plain similarity": "After layer {layer}, {who} is most similar to {place}: cosine {value} of at most 1.",
    "plain components": "After layer {layer}, patches of similar colors have similar tokens. The colors have no other "
    "meaning.",
    "plain norms": "A token is a list of numbers. After layer {layer}, the one of {place} is the longest, {times} "
    "times the mean length.",
    "plain lens": "If the model ended after layer {layer} and read a single patch, {place} would give “{name}” most: "
    "{value}.",
    "plain contributions": "{whose}: {place} matters most for “{name}”{minus} directly, by {value}.",
    "plain method": "By this method, {place} counts most.",
    "plain class": "By this method, {place} counts most for {target}.",
    "plain class against": "By this method, no patch counts for {target}, and {place} counts most against it.",
    "plain similarity colors": " Red is similar, blue is opposite.",
    "plain contributions colors": " Red adds to its score, blue takes from it.",
    "plain class colors": " Red counts for it, blue against it.",
    "plain uniform": "All patches get the same within {bound}, so no place stands out.",
    "plain sinks": " Dashed: sinks ({count}), patches that get far more attention than the others.",
    # the logit lens
    "lens": "Logit lens after layer {layer}: the {quantity} of “{name}” if the model ended here and its head read "
    "one patch alone. {who} predicts “{best}” ({score}). Early layers are not trained to be read by this head; they "
    "may encode more than the logit lens shows",
    "lens readout": "{readout}",
    "lens title": "{who}, layer by layer",
    "lens note": "The likeliest class after each layer, by the logit lens. A click goes to the layer.",
    "probability": "probability",
    "value": "value",
    # contributions
    "all layers": "All heads of all layers",
    "all heads": "All heads of layer {layer}",
    "one head": "Head {head} of layer {layer}",
    "minus": " minus that of “{name}”",
    "contributions": "{whose}: direct contribution of each patch to the logit of “{name}”{minus}: {patches} in total",
    "contributions prefix": ", plus {share} from {prefix}",
    "contributions logit": ". The logit is {logit}. Indirect effects through later layers are not included",
    "parts": "What each part adds to the logit",
    "parts difference": "What each part adds to the logit difference",
    "parts note": "Heads, MLPs, embedding, and biases sum to the logit, {logit}.",
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
    "attention unit": "attention weight",
    "rollout unit": "rollout weight",
    "similarity unit": "cosine",
    "norms unit": "norm",
    "contributions unit": "logits",
    # the photo
    "cropped": "The model sees the middle {cols} × {rows} of {width} × {height} pixels.",
    # the panel of a map
    "sinks": " Dashed: sinks ({count}), patches that receive more than {times} times the median attention in this "
    "layer and {uniform} times uniform attention.",
    "hidden": "{unit}, without sinks",
    "similarity scale": "{unit}, ± the largest of other patches",
    "range": " Range over patches: {low} to {high}.",
    "peak": " The largest is {times} times their mean.",
    "uniform": " Drawn as uniform: none is more than {bound} from their mean, as with random weights.",
    "stretched": " Colors are stretched: differences look {times} times as large as on a scale from 0.",
    "input": " Model input: {height} × {width} pixels.",
    "cut": " No patch covers the last {pixels} pixels {where}.",
    "padded": " The last patches {where} reach {pixels} pixels beyond the image.",
    "bottom": "at the bottom",
    "right": "at the right",
    "squeezed": " The photo is squeezed {times} times.",
    "look from": "the patch to look from",
    # what the page is, and what the model knows
    "headline": "What a Vision Transformer sees",
    "lead": "A neural network reads a photo as small squares, its patches. Here you see what it looks at.",
    "knows": "The model knows {count} names",
    "doubt": "No class stands out. The photo may show none of the {count} things whose names the model knows.",
    "doubt shared": "No single class stands out: the three likeliest have {share} together.",
    # the challenge: heads off until the class changes
    "challenge": "How few heads must be off until the model stops seeing “{name}”? Now it gives it {before}.",
    "challenge on": "Without {heads}, the model gives “{name}” {after} in place of {before}. It is still its first "
    "choice.",
    "challenge won": "Without {heads}, the model no longer sees “{name}” ({after} in place of {before}), but “{other}” "
    "({share}).",
    # questions, each with a line
    "question look": "Where does it look?",
    "line look": "Each square is a patch. Move over the photo or tap it to see where a patch looks. A click stays "
    "there.",
    "question hold": "What has the patch become?",
    "line hold": "Each layer rewrites the tokens. Click a patch to find the patches that have become similar to it.",
    "question decide": "Which heads decide?",
    "line decide": "Each head adds to the score of the class. Click a bar to see which patches that comes from, and "
    "turn heads off to test it. Later layers may make up for a head that is off.",
    "line decide saved": "Each head adds to the score of the class. Click a bar to see which patches that comes from.",
    "question why": "Why this class?",
    "line why": "Six methods show which patches count for the class. They often disagree, so do not trust one alone.",
    "six": "Six methods, and how far each is above random orderings",
    "six unscored": "Six methods",
    "sigmas": "{sigmas} σ",
    "better": "Clearly better than chance",
    "no better": "No better than chance",
    "worse": "Worse than chance",
    # charts
    "distances": "All heads, mean attention distance in pixels",
    "mosaic": "All heads, from {source}, each from 0 to its largest weight",
    "mean row": "mean",
    "max row": "max",
    "trust": "How much to trust this map",
    "scoring": "Scoring: covering and revealing patches …",
    "unscored": "This page has the scores of the likeliest class only. For others, use vitlens page --scores.",
    "live unscored": "Not scored yet. A score covers and reveals the patches in the order of the map, and in random "
    "orders, and runs the model each time.",
    "score it": "Score this map",
    "too long": "Scoring would take about {minutes} minutes here. Use vitlens explain.",
    "page too long": "Scoring takes minutes, so it was left out of this page. Use vitlens page --scores.",
    "score": "Patches are covered {baseline}. Areas: deletion {deletion} (lower is better), insertion {insertion} "
    "(higher is better). Insertion − deletion is {verdict}.",
    "above": "{sigmas} σ above {orders} random orderings",
    "below": "{sigmas} σ below {orders} random orderings",
    "equal": "equal for all orders",
    # targets
    "predicted": "the predicted class",
    "named": "{name} ({score})",
    "a class": "A class",
    "to a text": "Similarity to a text",
    "to an image": "Similarity to a photo",
    "like a text": "similarity to “{name}”",
    "like an image": "similarity to {name}",
    "alike": "This photo and “{name}” are the same to the model, so every gradient of their similarity is zero. Choose "
    "another photo.",
    "no other photo": "This model has no classes. Its maps explain the similarity to another photo, and the page has "
    "none. Add one.",
    "nothing": "nothing",
    # heads off
    "by mean": "their mean over {count} sample photos",
    "by mean here": "their mean over the {count} photos of this page",
    "by zero": "zero",
    "off": " Turned off: {heads}, replaced with {way}.",
    "all off": " Turned off: {heads}, each replaced with {way}.",
    "head of": "head {head} of {layer}",
    "count of heads": "{count} heads",
    "layer": "layer {layer}",
    "the pool": "the pool",
    # steps of the tour
    "tour pixels": "The model sees {image} pixels of {channels} each: {middle} in the middle of the framed patch.",
    "tour patches": "The photo is cut into {rows} × {cols} = {patches} patches of {patch} pixels, {size} numbers each.",
    "tour tokens": "The model turns each patch into a token of {width} numbers and adds {table} vector for its place; "
    "there are {tokens} tokens{extra}.",
    "tour product": "In layer {layer}, head {head}, the patch has a query and row {row}, column {column} a key: the "
    "{products} products of their numbers, summed and scaled, give {logit}.",
    "tour softmax": "Softmax turns the {tokens} results of this query into weights that sum to 1: {logit} becomes "
    "{weight}.",
    "tour heads": "Each of the {heads} heads mixes the values of all tokens by its own weights; the largest on a "
    "patch: {reach}.",
    "tour stream": "In layer {layer}, {added}; its length is then {after}.",
    "tour parts": "attention adds a vector of length {first} to the token of length {before}, and the MLP one of "
    "length {second}",
    "tour layer": "the token of length {before} changes by a vector of length {first}",
    "tour depth": "Layer by layer the patch looks elsewhere, and {answer}.",
    "tour answer": "the classifier head, reading {readout} after each layer, goes from “{first}” ({before}) to "
    "“{last}” ({after}), the model's answer",
    "tour no answer": "as the model has no classes, its tokens are the result",
    # the harder steps of the tour in plain words
    "plain tour tokens": "A list of {width} numbers now stands for the patch: its token. {place}{summary}",
    "plain tour place": "A second list, for its place, was added, because the numbers alone do not show where it lies.",
    "plain tour no place": "None was added for its place.",
    "plain tour summary": " One more token, the {token}, belongs to no patch.",
    "plain tour product": "To decide where the patch looks, head {head} of layer {layer} compares a list of {products} "
    "numbers of this patch, its query, with one of every patch, its key. The better they match, the larger the "
    "result. For row {row}, column {column}, it is {logit}, {rank}.",
    "plain tour first": "the largest of all {tokens}",
    "plain tour rank": "larger than {below} of the {others} others",
    "plain tour softmax": "The results become shares of 100%, the weights: {share} of the attention goes to row {row}, "
    "column {column}. Even, each of the {tokens} tokens would get {even}.",
    "plain tour parts": "Layer {layer} does not replace the token, it adds to it: attention what it collects from "
    "other tokens, a list {first} as long as the token, and the MLP what it computes from that, a list {second} as "
    "long.",
    "plain tour layer": "Layer {layer} does not replace the token, it adds a list of numbers to it, {first} as long.",
    # pages without Python
    "page": "A saved page. Other photos and classes, slower methods, and turning heads off need vitlens app.",
    "live": "The model runs in this page. Photos stay on this machine: the page cannot send anything. Slower methods "
    "need vitlens app.",
    "running": "Running the model.",
    "no image": "Expected an image, but “{name}” is damaged or in a format that this browser does not read. Export it "
    "as JPEG or PNG.",
    "broken off": "“{name}” ends before its image does, as after a transfer that broke off. Get the whole file.",
    "strip": "Expected an image, got a strip of {width} × {height} pixels. Crop it first.",
    "too many pixels": "“{name}” has {width} × {height} pixels and must have 1 to 80,000,000. Make it smaller.",
    "over white": "Transparent areas of “{name}” were filled with white.",
    "turned": "“{name}” was turned upright by its EXIF orientation.",
    "frames": "“{name}” holds {count} images; the first is shown.",
    "ends gray": "“{name}” ends in an even gray, as a file that was cut.",
    "other levels": "“{name}” has a color profile or several images, or is neither a PNG of 8 bits nor a baseline "
    "JPEG, so its levels may differ from those in Python.",
    "other decoder": "This browser decodes files such as “{name}” a little differently from Python, so its levels may "
    "differ.",
    "no similarity of whole": "The similarity to another photo is explained for cropped photos. Turn off Whole photo.",
    "no means of whole": "The mean outputs of heads belong to the grid of a cropped photo. Replace heads by zero, or "
    "turn off Whole photo.",
    "zero now": "Heads that are off are now replaced with zero, because parts add up to the logit only then.",
    "not additive": "Parts add up to the logit only if heads are on or replaced with zero. Replace with zero, or turn "
    "the heads on.",
    "left out": " Left out, so that the file stays below 30 MB: rollout and layers {layers}.",
    # a model that a person opens
    "blank": "Open a Vision Transformer",
    "blank drop": "Drop its config.json and model.safetensors here, or the folder that has them.",
    "blank files": "timm and transformers write both files with save_pretrained. A hub offers them on the page of a "
    "model, under “Files”.",
    "blank kinds": "Models that open: timm's plain Vision Transformers, such as ViT, DeiT and DINOv2, and ViT, DeiT, "
    "DINOv2 and the image tower of CLIP from transformers, up to the size B.",
    "blank more": "Useful beside them: preprocessor_config.json, which says how photos are prepared, and a text file "
    "with the name of a class a line.",
    "blank private": "The model runs in this page. Files and photos stay on this machine: the page cannot send "
    "anything.",
    "blank photo": "This is not a file of a model. Open a model first, and drop photos then.",
    "blank folder": "This browser could not read the folder. Choose its files.",
    "files": "the files",
    "opening": "Opening {name}",
    "canceled": "Opening was canceled.",
    "runs opened": "This page runs {name}, which was opened from its own files and is not in this file. ",
    "keeping": "Writing the page",
    "effects": "Effects of heads",
    "photo page": "A page of one photo, saved from a page with the model. Other photos and classes, and turning heads "
    "off, need that page.",
    "photo footer": "This file contains {photo} and what {name} computed from it, without the model. Written in a page "
    "of {versions}.",
    "photo unscored": "This map has no score. The page with the model can score it.",
    "kept footer": "This file contains {name} and these photos: {photos}. Written in a page of {versions}.",
    "too large to keep": "A page holds at most {most} MB of a model, and {name} has {size} MB. Keep its files instead.",
    "file is gone": "{name} could not be read again, as it was moved or changed. Open the model again.",
    "beside opened": "{name} beside it was opened from its own files too. ",
    "first state": "First state",
    "second state": "the second state",
    "all on": "Second state, all heads on",
    "beside sees": "Likeliest here: {classes}.",
    "beside no view": "{name} has no classes, so it has no such map. Choose a view of attention or tokens, or "
    "the similarity to a photo.",
    "beside no query": "{name} has no {query} to look from. Choose a patch, or a token of both models.",
    "beside no class": "{name} has no class named “{label}”. Choose “predicted”, or a class that both models know.",
    "beside outside": "The patch lies outside of what {name} sees of the photo, so the nearest one is shown.",
    "not opened": "{name} could not be opened ({error}). Choose the files again.",
    # files of a model that a page refuses
    "no weights": "Expected model.safetensors and config.json, got no weights. Choose both files of a model.",
    "several weights": "Expected one .safetensors file, got {count} without model.safetensors.index.json. Choose the "
    "files of one model.",
    "no index": "The weights are in several files. Choose all of them and {file}, which lists their tensors.",
    "no shard": "The index lists {file}, which was not chosen. Choose all files of the model.",
    "wrong shard": "{file} holds “{tensor}”, which the index does not list for this file. Get the files again.",
    "lost tensor": "The index lists “{tensor}” in {file}, which lacks it. Get the files again.",
    "bad index": "{file} has no weight_map with a file for each tensor. Get the file again.",
    "no config": "Expected config.json beside the weights, which has the number of heads. Choose it, too.",
    "pickle": "“{file}” is a pickle, which can run code when it is read, so a page does not open it. Convert it in "
    "Python:\nimport torch\nfrom safetensors.torch import save_file\n"
    'weights = torch.load("{code}", map_location="cpu", weights_only=True)\n'
    "weights = dict((name, tensor.clone().contiguous()) for name, tensor in weights.items())\n"
    'save_file(weights, "model.safetensors")',
    "pointer": "“{file}” is a pointer of Git LFS, a text of a few lines in place of the file. Run git lfs pull.",
    "web page": "“{file}” is a web page, as a download saves when it needs a login. Download the file itself.",
    "compressed": "“{file}” is compressed. Unpack it first.",
    "other weights": "“{file}” is in another format than safetensors. Save the model with save_pretrained.",
    "short weights": "“{file}” has {size} bytes, too few for a safetensors file. Get the whole file.",
    "long header": "“{file}” declares a header of {length} bytes, and at most 16 MB are read. Expected a safetensors "
    "file. Get the file again.",
    "cut header": "“{file}” declares a header of {length} bytes and ends before it does. Get the whole file.",
    "long JSON": "“{file}” has over 16 MB, too much for a file of settings. Choose the config.json of the model.",
    "no JSON": "“{file}” holds no JSON object in UTF-8 where one was expected. Get the file again.",
    "deep JSON": "“{file}” nests more than 32 objects or lists. Get the file again.",
    "many names": "“{file}” has over 200,000 names and texts, more than any model. Get the file again.",
    "name twice": "“{file}” has the name “{name}” twice, so it is unclear which counts. Save the model again.",
    "no tensors": "“{file}” holds no tensors. Get the file again.",
    "bad entry": "“{file}” describes “{tensor}” without type, shape and offsets. Save the model again.",
    "bad type": "“{tensor}” in “{file}” has the type {type}, which safetensors does not have. Save the model again.",
    "bad shape": "“{tensor}” in “{file}” has the shape {shape}. Expected up to 8 whole numbers. Save the model again.",
    "bad offsets": "“{tensor}” in “{file}” has the offsets {offsets}. Expected two whole numbers. Save the model "
    "again.",
    "outside": "“{tensor}” has the offsets {offsets}, beyond the end of “{file}”. Get the whole file.",
    "bad size": "“{tensor}” in “{file}” has {held} bytes, and its shape needs {bytes}. Save the model again.",
    "overlap": "“{tensor}” in “{file}” shares bytes with another tensor. Save the model again.",
    "gap": "“{file}” has bytes that belong to no tensor. Save the model again.",
    "other type": "“{tensor}” in “{file}” has the type {type}. Expected F32, F16 or BF16. Save the model in one of "
    "them.",
    "changed file": "“{file}” changed while “{tensor}” was read. Choose it again.",
    "not finite": "“{tensor}” in “{file}” has values that are not finite. Save the model again.",
    "unknown config": "config.json has neither timm's “architecture” nor transformers' “model_type”. Save the model "
    "with save_pretrained of its library.",
    "unknown architecture": "The architecture “{name}” is not one that a page runs: timm's plain Vision Transformers "
    "that read a class token or a mean. The number of heads is in no tensor, so it is not guessed. Use vitlens app.",
    "unknown class": "The class “{name}” of config.json is not one that a page runs: {names}. Use vitlens app.",
    "two classes": "config.json names the class {name} and the model_type “{type}”. Expected {expected}. Get the file "
    "again.",
    "own code": "config.json names Python code of its own (auto_map), which a page cannot run. Use vitlens app.",
    "unknown processor": "The class “{name}” of preprocessor_config.json is not one that a page runs: {names}. Use "
    "vitlens app.",
    "unknown argument": "config.json sets {name} to {value}, which a page does not know. Use vitlens app.",
    "unknown activation": "The activation “{name}” is not one that a page runs: GELU, exact, by tanh or quick. Use "
    "vitlens app.",
    "unknown pool": "The read-out “{name}” is not one that a page runs: token or avg. Use vitlens app.",
    "two pools": "config.json gives the read-out “{stated}”, and its architecture reads {pool}. Add global_pool to "
    "model_args to say which is right.",
    "bad number": "{name} must be a whole number from 1 to {most}, got {value}.",
    "bad value": "config.json or preprocessor_config.json sets {name} to {value}, which a page does not run. Use "
    "vitlens app.",
    "not square": "{name} is {value}. Expected a square, as a page shows the square middle of a photo. Use vitlens "
    "app.",
    "not colors": "The model takes {channels} channels. Expected 3, red, green and blue. Use vitlens app.",
    "other size": "config.json gives {stated} as its {name}, and the weights have {held}. Choose the config.json that "
    "belongs to the weights.",
    "wrong shape": "“{tensor}” has the shape {shape}. Expected {expected}. Choose the config.json that belongs to the "
    "weights.",
    "missing tensor": "The weights have no “{tensor}”, which the model needs. Choose the config.json that belongs to "
    "the weights.",
    "unknown tensors": "{count} tensors of the weights are not part of the model that config.json describes: {names}. "
    "Choose the config.json that belongs to the weights, or use vitlens app.",
    "uneven heads": "{heads} heads do not divide the width {width}. Choose the config.json that belongs to the "
    "weights.",
    "odd width": "The model has a width of {width}. Expected multiples of 8 for tokens, heads and MLPs. Use vitlens "
    "app.",
    "cut patches": "{size} pixels are not a multiple of the patches of {patch} pixels. Choose another size.",
    "many patches": "The image has {patches} patches, and at most 16,384 are computed. Choose a smaller size.",
    "label count": "The names are {count}, and the model has {classes} classes. Choose a file with a name a line.",
    "too large": "The model needs {size} MB, and a page can hold 4,096 MB. Choose a smaller model or size.",
    "no memory": "The browser has no {size} MB free for the model. Close other tabs, or choose a smaller model.",
    "no classes": "The model has no classes, so there is no class to explain. Choose a view that needs none.",
    # notes on the files of a model
    "twin": "The activation is in no tensor. {name} uses GELU. For weights that were trained with quick GELU, as "
    "OpenAI's, change the architecture of config.json to {twin}.",
    "assumed": "config.json does not give {names}, so the defaults of {library} are used.",
    "no processor": "There is no {file}, so photos are prepared by the defaults of transformers.",
    "resized positions": "Its positions were resized from {from} × {from} to {to} × {to} patches, as {library} does "
    "it.",
    "unused tensors": "Tensors that its forward does not need ({count}): {names}.",
    # the address of a page
    "nearest": "The nearest state is shown.",
    "no such value": "{name} has no value {value}.",
    "no such patch": "There is no patch in row {row}, column {column}.",
    "no such head": "There is no head “{value}”. A head is its layer and its number, such as 0.2.",
    "no class": "No class is named “{name}”. Give whole words of a name, or a number.",
}
"""Sentences by name."""


def say(name: str, /, **fields: object) -> str:
    """A sentence of `WORDS` with its fields filled in."""
    return WORDS[name].format(**fields)


def percent(share: float) -> str:
    """A share in percent, such as "12%", or "< 0.5%" for smaller ones."""
    return "< 0.5%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def fine_percent(share: float) -> str:
    """A share in percent with one decimal, such as "1.2%", or "< 0.1%" for smaller ones."""
    return "< 0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"
