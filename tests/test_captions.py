"""The sentences in plain words under a map and in the tour, against the values that they name."""

import re

import numpy as np
import pytest
import torch
from support import PICTURE, send, values

import vitlens_explorer as widgets
from vitlens.attribution import METHODS, Method, register
from vitlens.images import samples
from vitlens_explorer.views import supported_views

PLACE = re.compile(r"row (\d+), column (\d+)")
SHARE = re.compile(r"([\d.]+)%")
VIEWS = "attention", "received", "rollout", "norms", "lens", "grad_cam"


def plain(widget) -> str:
    return widget.frame["panels"][0]["plain"]


def place_of(words) -> tuple[int, int]:
    """The patch that a sentence names."""
    (found,) = PLACE.findall(words)
    return tuple(map(int, found))


def strongest(map_: np.ndarray) -> tuple[int, int]:
    row, col = divmod(int(map_.argmax()), map_.shape[1])
    return row, col


@pytest.fixture
def sharp(vit):
    """A model whose attention differs from uniform."""
    model = vit(num_classes=5)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 4
    return model


def explore(model, **values):
    explorer = widgets.explore(model, PICTURE)
    explorer.set(**values)
    return explorer


@pytest.mark.parametrize("view", VIEWS)
def test_plain_words_name_the_strongest_patch(sharp, view):
    explorer = explore(sharp, view=view, layer=1)
    shown = values(explorer)
    assert place_of(plain(explorer)) == strongest(shown)
    if view in ("attention", "received", "rollout"):
        share, even = map(float, SHARE.findall(plain(explorer)))
        assert share == pytest.approx(100 * shown.max(), abs=0.051)
        assert even == pytest.approx(100 / 17, abs=0.051)
    if view == "norms":
        times = float(re.search(r"([\d.]+) times", plain(explorer))[1])
        assert times == pytest.approx(shown.max() / shown.mean(), rel=6e-3)


def test_plain_words_of_every_view_are_whole_sentences(sharp):
    explorer = widgets.explore(sharp, PICTURE)
    for view in supported_views(explorer.page.forward):
        if explorer.page.forward.classes and view not in ("shap", "kernel_shap"):
            explorer.set(view=view)
            words = plain(explorer)
            assert words.endswith(".") and "{" not in words and "None" not in words, (view, words)


def test_plain_words_name_heads_and_queries(sharp):
    explorer = explore(sharp, view="attention", layer=1)
    assert plain(explorer).startswith("In layer 1, with its heads averaged, ")
    explorer.set(head="max")
    assert plain(explorer).startswith("In layer 1, with the largest weight of any head, ")
    explorer.set(head=2, row=1, column=2)
    assert plain(explorer).startswith("In head 2 of layer 1, the framed patch (the query) looks ")
    explorer.set(query="readout")
    assert "the summary token (class token) looks most at row" in plain(explorer)


def test_plain_words_of_the_query_itself(sharp):
    """In layer 0, half of a rollout stays with the patch."""
    explorer = explore(sharp, view="rollout", layer=0, row=2, column=1)
    assert strongest(values(explorer)) == (2, 1)
    assert "takes most from itself, " in plain(explorer)
    explorer.set(view="similarity")
    others = values(explorer).copy()
    others[2, 1] = -2
    assert place_of(plain(explorer)) == strongest(others)


def test_plain_words_of_signed_maps_follow_the_colors(sharp):
    explorer = explore(sharp, view="contributions")
    shown = values(explorer)
    assert shown.min() < 0 and place_of(plain(explorer)) == strongest(np.abs(shown))
    written = re.search(r"by (−?[\d.e−]+)\.", plain(explorer))[1]
    number = float(written.replace("−", "-"))
    assert number == pytest.approx(shown[place_of(plain(explorer))], rel=6e-3)
    colors = "Red adds to its score, blue takes from it."
    assert colors in plain(explorer)
    explorer.set(colors="viridis")
    assert "Red" not in plain(explorer)
    explorer.set(colors="", stretch=True)
    assert "Red" not in plain(explorer)


def test_plain_words_of_a_map_against_a_class(sharp):
    """A map without positive values names the patch that counts most against the class."""
    explorer = explore(sharp, view="integrated_gradients", target=1)
    signed = values(explorer)
    assert signed.min() < 0 < signed.max()
    assert place_of(plain(explorer)) == strongest(signed)
    page = explorer.page
    found = page._computed_map("integrated_gradients")
    found.values[:] = -np.abs(found.values)
    words = page._panel(found).plain
    assert "no patch counts for “1”" in words
    assert place_of(words) == strongest(-found.values)


def test_plain_words_of_a_uniform_map(vit):
    model = vit(num_classes=5)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    explorer = explore(model, view="attention")
    assert plain(explorer).startswith("All patches get the same within ")


def test_plain_words_name_targets_and_heads_that_are_off(sharp):
    explorer = explore(sharp, view="grad_cam", target=2, against=3)
    assert "counts most for “2” rather than “3”" in plain(explorer)
    predicted = explorer.page.forward.likeliest[0]
    assert predicted == 2 or f"“{predicted}”" in plain(explorer), "the prediction is beside it"
    explorer.set(target=("picture", "coffee"))
    assert "counts most for the similarity to “coffee”" in plain(explorer)
    explorer.set(view="attention", off=((0, 1),))
    assert "Turned off: head 1 of layer 0" in plain(explorer)


@pytest.mark.parametrize("classes", [5, 0])
def test_plain_words_of_a_method_without_a_class(vit, monkeypatch, classes):
    monkeypatch.setitem(METHODS, "falling", None)  # so that it is removed again
    del METHODS["falling"]
    ramp = torch.arange(16.0).flip(0).view(1, 4, 4)
    falling = lambda model, images, target, against: ramp  # noqa: E731
    register(Method("falling", "falling", "capture", "one forward", falling))
    explorer = explore(vit(num_classes=classes), view="falling")
    assert plain(explorer) == "By this method, row 0, column 0 counts most."


def test_plain_words_of_the_tour(sharp):
    explorer = widgets.explore(sharp, samples()["coffee"])
    tour, _ = explorer.page.look_up({"ask": "tour"}, lambda *_: None)
    simple, value = tour["simply"], tour["value"]
    assert [bool(words) for words in simple] == [step in (2, 3, 4, 6) for step in range(8)]
    logits, key = np.array(value["logits"]), value["key"]
    below = (logits < logits[key]).sum()
    rank = "the largest of all 17" if below == 16 else f"larger than {below} of the 16 others"
    assert rank in simple[3]
    share = float(SHARE.findall(simple[4])[1])
    assert share == pytest.approx(100 * np.exp(logits[key]) / np.exp(logits).sum(), abs=0.051)
    layer = tour["layer"]
    ratios = np.array(tour["added"][layer]) / tour["lengths"][layer]
    written = [int(each) for each in re.findall(r"(\d+)%", simple[6])]
    assert written == [round(100 * ratio) for ratio in ratios]
    assert send(explorer, {"set": {"layer": 0}}) == ""
