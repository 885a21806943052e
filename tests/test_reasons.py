"""Views of the explorer that say why: the maps of `vitlens.attribution`, their scores, and the choice of what is
explained."""

import io
import json
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from data_support import saved
from PIL import Image
from supported_support import small
from test_explorer import PICTURE, browser, values, words

from vitlens import faithfulness, intervene, widgets
from vitlens.attribution import METHODS, Method, like, register, text
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.supported import pooled
from vitlens.widgets import reasons
from vitlens.widgets.likeness import Likeness


@pytest.fixture
def explorer(vit):
    return widgets.explore(vit(), PICTURE)


def given(model):
    return preprocess(model, PICTURE, size=model.patch_embed.img_size)


def likeliest(model):
    with torch.no_grad():
        return model(given(model))[0].softmax(-1).sort(descending=True)


def until_scored(explorer):
    deadline = time.monotonic() + 120
    while "curves" not in explorer.frame["score"]:
        assert time.monotonic() < deadline, explorer.frame["score"]
        time.sleep(0.02)
    return explorer.frame["score"]


def shown_controls(explorer):
    return [control["name"] for control in explorer.frame["controls"] if not control["hidden"]]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.knows_class])
def test_the_map_is_the_methods(vit, name):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    explorer.set(view=name)
    np.testing.assert_allclose(values(explorer), METHODS[name](model, given(model), order[0].item())[0], atol=1e-6)
    explorer.set(target=order[2].item(), against=order[1].item())
    expected = METHODS[name](model, given(model), order[2].item(), against=order[1].item())[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert f"for “{order[2]}” (" in words(explorer) and f"rather than “{order[1]}” (" in words(explorer)


def test_a_method_that_was_registered_is_a_view(vit, monkeypatch):
    """Also by an explorer that is open, and one that knows no class is not said to explain it."""
    for name in ("mine", "plain"):
        monkeypatch.setitem(METHODS, name, None)  # so that it is removed again
        del METHODS[name]
    explorer = widgets.explore(vit(), PICTURE)
    flat = lambda model, images, target, against: torch.ones(1, 4, 4)  # noqa: E731
    register(Method("mine", "my method", "gradients", "one forward", flat))
    register(Method("plain", "plain one", "capture", "one forward", flat))
    explorer.set(view="mine")
    assert (values(explorer) == 1).all() and "My method for “" in words(explorer)
    options = next(control["options"] for control in explorer.frame["controls"] if control["name"] == "view")
    assert {("My method", "mine"), ("Plain one", "plain")} <= set(options)
    explorer.set(view="plain")
    assert "for “" not in words(explorer)


def test_the_score_is_that_of_the_curves(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    target, against = order[1].item(), order[3].item()
    explorer.set(view="legrad", target=target, against=against)
    found = until_scored(explorer)
    maps = torch.cat([METHODS["legrad"](model, given(model), target, against=against),
                      faithfulness.random_maps(explorer.subject.grid, reasons.ORDERS)])  # fmt: skip
    expected = faithfulness.curves(model, given(model), maps[:, None], target, against=against, step=2)
    assert found["shares"] == [k / 8 for k in range(9)]
    for name in ("deletion", "insertion"):
        curve = getattr(expected, name)[:, 0]
        np.testing.assert_allclose(found["curves"][name], curve[0], atol=1e-6)
        np.testing.assert_allclose(found["curves"][f"random {name}"], curve[1:].mean(0), atol=1e-6)
    deletion, insertion = expected.deletion_area[:, 0], expected.insertion_area[:, 0]
    gain = insertion - deletion
    sigmas = ((gain[0] - gain[1:].mean()) / gain[1:].std()).item()
    side = "above" if sigmas >= 0 else "below"
    assert found["words"].startswith("Patches are covered by the mean color. Areas: deletion")
    assert f"deletion {deletion[0]:.3g} (low is good), insertion {insertion[0]:.3g} (high is good)" in found["words"]
    assert f"lies {abs(sigmas):.3g} σ {side} 8 random orders" in found["words"]


def test_a_click_on_a_class_asks_why(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    probabilities, order = likeliest(model)
    bars = explorer.frame["bars"]
    assert [bar["number"] for bar in bars] == order[:5].tolist() and not any(bar["now"] for bar in bars)
    assert explorer.frame["score"] is None and {"layer", "head", "query"} < set(shown_controls(explorer))
    assert browser(explorer, {"why": bars[1]["number"]}) == ""
    assert explorer.state["view"] == "relevance" and explorer.state["target"] == order[1].item()
    assert [bar["now"] for bar in explorer.frame["bars"]] == [False, True, False, False, False]
    assert explorer.frame["dots"] is None and explorer.frame["score"]
    names = shown_controls(explorer)
    assert {"target", "against"} < set(names) and not {"layer", "head", "query", "row", "column"} & set(names)
    explorer.set(view="grad_cam")
    browser(explorer, {"why": bars[2]["number"]})
    assert explorer.state["view"] == "grad_cam" and explorer.choice.target == order[2].item()
    assert probabilities[2].item() == pytest.approx(explorer.frame["bars"][2]["share"], abs=1e-6)


def test_classes_stay_chosen_for_another_picture(vit):
    explorer = widgets.explore(vit(num_classes=100), PICTURE)
    _, order = likeliest(explorer.model)
    explorer.set(view="relevance", target=order[9].item(), against=order[8].item())
    with pytest.raises(ValueError, match="'Rather than' must be one of 'none', "):
        explorer.set(against=order[9].item())
    explorer.set(target=order[8].item())
    assert explorer.state["against"] == "none"
    for name in samples():
        explorer.set(photograph=name)
        assert explorer.state["target"] == order[8].item() and explorer.frame["message"] == ""
        assert f"for “{order[8]}” (" in words(explorer)


def test_any_class_can_be_asked_for(vit):
    model = vit(num_classes=100)
    model.label_names = [f"animal {number}, beast" if number == 7 else f"plant {number}" for number in range(100)]
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    rare, rarer = order[order != 7][-2:].tolist()
    explorer.set(view="legrad")
    assert browser(explorer, {"set": {"another": f" plant {rare} "}}) == ""
    assert explorer.state["target"] == rare
    np.testing.assert_allclose(values(explorer), METHODS["legrad"](model, given(model), rare)[0], atol=1e-6)
    for wrong, sentence in (("plant 7", "no class called 'plant 7'. Did you mean"), ("100", "has classes 0 to 99")):
        assert sentence in browser(explorer, {"set": {"another": wrong}})
        assert explorer.state["target"] == rare and explorer.state["another"] == f" plant {rare} "
    browser(explorer, {"set": {"another": str(rarer)}})
    options = {control.name: control.options for control in explorer.controls()}
    explorer.set(against=rare)  # what was asked for before can be chosen
    assert {control.name: control.options for control in explorer.controls()}["target"] == options["target"]
    expected = METHODS["legrad"](model, given(model), rarer, against=rare)[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    explorer.set(target="Animal 7")
    assert explorer.state["target"] == 7 and explorer.state["another"] == ""
    for predicted, none in (("predicted", "none"), (None, None)):
        explorer.set(target=7, against=rare)
        explorer.set(target=predicted, against=none)
        assert explorer.choice.target is None and explorer.choice.against is None
    for wrong in (1.5, [7]):
        with pytest.raises(ValueError, match="as an integer"):
            explorer.set(target=wrong)
    with pytest.raises(ValueError, match="'Any class' .* text, got 5"):
        explorer.set(another=5)
    for _ in range(6):  # classes that can be chosen anyway do not drive these out
        explorer.set(target=order[0].item())
        explorer.set(target=order[1].item())
    explorer.set(target=rare, against=rarer)
    explorer.set(target=7, against="none")
    assert explorer.state["typed"][0] == 7 and sorted(explorer.state["typed"]) == sorted((7, rare, rarer))


def test_classes_of_a_wrapped_model(vit):
    explorer = widgets.explore(torch.nn.DataParallel(vit()), PICTURE)
    explorer.set(view="legrad", target=3)
    assert explorer.state["target"] == 3


def test_digits_are_a_name_first(vit):
    model = vit(num_classes=20)
    model.label_names = [str(number + 1) for number in range(20)]
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", another="1")
    assert explorer.state["target"] == 0 and "for “1” (" in words(explorer)
    model.label_names = [f"plant {number}" for number in range(20)]
    explorer.set(another="1")
    assert explorer.state["target"] == 1


def test_a_model_without_classes_has_none_to_ask_for(vit):
    explorer = widgets.explore(vit(num_classes=0), PICTURE)
    with pytest.raises(ValueError, match="'View' .* one of 'attention', .* got 'lens'"):
        explorer.set(view="lens")
    explorer.set(view="relevance")  # what is left to ask is a likeness
    assert explorer.frame["bars"] == [] and explorer.state["target"] == ("picture", "astronaut")
    assert "another" not in {control["name"] for control in explorer.frame["controls"]}
    with pytest.raises(ValueError, match="no classes|has none"):
        explorer.set(target=3)


def other(model, name):
    return preprocess(model, samples()[name], size=model.patch_embed.img_size)


@pytest.mark.parametrize("name", ["relevance", "legrad", "grad_cam", "direct", "occlusion"])
@pytest.mark.parametrize("classes", [0, 10])
def test_a_likeness_is_the_methods(vit, name, classes):
    model = vit(num_classes=classes)
    explorer = widgets.explore(model, PICTURE)
    coffee, rocket = (like(other(model, name)) for name in ("coffee", "rocket"))
    explorer.set(view=name, target=("picture", "coffee"))
    np.testing.assert_allclose(values(explorer), METHODS[name](model, given(model), coffee)[0], atol=1e-6)
    explorer.set(against=("picture", "rocket"))
    expected = METHODS[name](model, given(model), coffee, against=rocket)[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    with torch.no_grad():
        found = [pooled(model, x)[0] for x in (given(model), other(model, "coffee"), other(model, "rocket"))]
    one, two = (F.cosine_similarity(found[0], each, dim=0).item() for each in found[1:])
    for what, cosine in (("for likeness to “coffee”", one), ("rather than to “rocket”", two)):
        assert f"{what} (cosine {cosine:.3g})".replace("-", "−") in words(explorer)


def test_the_score_of_a_likeness_is_its_cosine(vit):
    model = vit(num_classes=0)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", target=("picture", "coffee"), against=("picture", "rocket"))
    found = until_scored(explorer)
    coffee, rocket = (like(other(model, name)) for name in ("coffee", "rocket"))
    maps = METHODS["legrad"](model, given(model), coffee, against=rocket)
    expected = faithfulness.curves(model, given(model), maps[None], coffee, against=rocket, step=2)
    for name in ("deletion", "insertion"):
        np.testing.assert_allclose(found["curves"][name], getattr(expected, name)[0, 0], atol=1e-6)
    assert found["scale"] == "difference of the two cosines"


def test_pictures_that_are_alike_change_places(vit):
    explorer = widgets.explore(vit(num_classes=0), PICTURE)
    shown = explorer.state["photograph"]
    explorer.set(view="legrad", target=("picture", "coffee"), against=("picture", "rocket"))
    explorer.set(photograph="coffee")
    assert explorer.state["target"] == ("picture", shown) and explorer.state["against"] == ("picture", "rocket")
    explorer.set(photograph="rocket")
    assert explorer.state["against"] == "none"
    with pytest.raises(ValueError, match="'Explain' must be one of"):
        explorer.set(target=("picture", "rocket"))
    with pytest.raises(ValueError, match="text tower"):
        explorer.set(target=("text", "a cat"))
    assert explorer.state["target"] == ("picture", shown)


def test_two_uploads_can_be_alike(vit):
    model = vit(num_classes=0)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad")
    for name in ("coffee", "rocket"):
        assert browser(explorer, {"upload": f"{name}.png"}, saved(samples()[name])) == ""
    assert browser(explorer, {"set": {"target": ["picture", "your earlier picture"]}}) == ""
    expected = METHODS["legrad"](model, other(model, "rocket"), like(other(model, "coffee")))[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert browser(explorer, {"upload": "flower.png"}, saved(samples()["flower"])) == ""
    expected = METHODS["legrad"](model, other(model, "flower"), like(other(model, "rocket")))[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)


def test_a_likeness_is_that_of_the_model_without_its_heads(vit):
    model = vit(num_classes=0)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", target=("picture", "coffee"), off=[(1, 0)], way="zero")
    with intervene(model, heads={(1, 0): "zero"}):
        expected = METHODS["legrad"](model, given(model), like(other(model, "coffee")))[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)


class Tokens(dict):
    def to(self, device):
        return self


def tokenized(prompts, **_):
    """One made-up word for each letter, and the end."""
    ids = [[3 + ord(letter) % 90 for letter in prompt][:14] + [98] for prompt in prompts]
    return Tokens(input_ids=torch.tensor(ids))


def test_a_text_is_explained_by_a_model_that_reads_texts(monkeypatch):
    clip = small("CLIPModel", text=dict(eos_token_id=98))
    monkeypatch.setattr("vitlens.recorder.supported.transformers._tokenizer", lambda model: tokenized)
    explorer = widgets.explore(clip, PICTURE)
    explorer.set(view="relevance")
    assert explorer.state["target"][0] == "picture" and "another" in shown_controls(explorer)
    assert browser(explorer, {"set": {"another": " a cat "}}) == "" and explorer.state["target"] == ("text", "a cat")
    assert "against" not in shown_controls(explorer)
    x = preprocess(clip, PICTURE)
    cat, dog = (text(prompt, tokenizer=tokenized) for prompt in ("a cat", "a dog"))
    np.testing.assert_allclose(values(explorer), METHODS["relevance"](clip, x, cat)[0], atol=1e-6)
    assert browser(explorer, {"set": {"rather": "a dog"}}) == ""
    expected = METHODS["relevance"](clip, x, cat, against=dog)[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert "for likeness to “a cat” (" in words(explorer) and "rather than to “a dog” (" in words(explorer)
    assert browser(explorer, {"set": {"rather": "a cat"}}) != "" and explorer.state["against"] == ("text", "a dog")
    assert browser(explorer, {"set": {"rather": ""}}) == "" and explorer.state["against"] == "none"
    explorer.set(target=("picture", "coffee"))
    menu = next(control for control in explorer.frame["controls"] if control["name"] == "target")
    assert menu["groups"][0] == ("Likeness to a text", 2) and {"against", "another"} <= set(shown_controls(explorer))

    def nowhere(model):
        raise OSError("The tokenizer is not on this disk.")

    monkeypatch.setattr("vitlens.recorder.supported.transformers._tokenizer", nowhere)
    assert browser(explorer, {"set": {"another": "a bird"}}) == "The tokenizer is not on this disk."
    assert explorer.state["target"] == ("picture", "coffee")


def test_a_view_of_classes_alone_keeps_what_others_explain(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", target=("picture", "coffee"))
    explorer.set(view="lens")
    assert f"probability of “{likeliest(model)[1][0]}”" in words(explorer)
    assert next(c for c in explorer.frame["controls"] if c["name"] == "target")["value"] == "predicted"
    explorer.set(view="legrad")
    assert "likeness to “coffee”" in words(explorer)


def test_a_score_whose_parts_are_forgotten_is_made_anew_when_nothing_else_is_asked(explorer):
    explorer.set(view="legrad")
    before = until_scored(explorer)
    made = explorer.subject.small
    made.pop(next(key for key in made if key[0] == "random"))  # as after a day of clicks
    explorer.set(strength=0.5)
    assert "curves" not in explorer.frame["score"]  # the page does not wait for it
    assert until_scored(explorer) == before


def test_what_would_take_too_long_says_so(explorer, monkeypatch):
    explorer.subject.mean_distance()  # what is made before
    explorer.subject.once(("seconds",), lambda: torch.tensor(60.0))
    explorer.set(view="relevance")
    assert not explorer.afterwards(lambda: True)
    assert explorer.frame["score"]["words"].startswith("Not scored here: it would take about 252 minutes")
    assert not explorer.subject.has("score", "relevance", explorer.subject.likeliest[0], None)


def test_a_map_that_would_take_too_long_is_no_map(explorer):
    explorer.subject.once(("seconds",), lambda: torch.tensor(60.0))
    explorer.set(view="relevance")
    page = explorer.frame["panels"]
    message = r"KernelSHAP takes 256 forwards, here about 256 minutes\. .* `vitlens explain --methods kernel_shap`"
    with pytest.raises(ValueError, match=message):
        explorer.set(view="kernel_shap")
    assert explorer.state["view"] == "relevance" and explorer.frame["panels"] == page, "the last page stays"


def test_slow_maps_are_given_up_when_something_else_is_asked(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    shown, forwards = explorer.subject, []
    handle = model.norm.register_forward_hook(lambda *_: forwards.append(1))  # features need no more of a forward
    wanted = lambda: len(forwards) < 3  # noqa: E731
    coffee = Likeness("coffee", ("coffee",), samples()["coffee"])
    for choice in (reasons.Choice(), reasons.Choice(target=coffee)):
        for make in (reasons.views()["kernel_shap"].make, lambda *a: reasons.scored(a[0], "relevance", *a[1:])):
            forwards.clear()
            with pytest.raises(reasons.Superseded):
                make(shown, choice, wanted)
            assert len(forwards) == 3
    handle.remove()
    assert not model._forward_pre_hooks and not model.patch_embed._forward_pre_hooks
    explorer.set(view="relevance")
    assert "curves" in until_scored(explorer)


def test_what_is_saved_has_the_score(explorer, monkeypatch):
    sent = []
    explorer.set(view="relevance")
    until_scored(explorer)
    monkeypatch.setattr(explorer, "send", lambda content, buffers: sent.append((content, buffers)))
    browser(explorer, {"press": "save"})
    ((content, (picture, arrays)),) = sent
    assert content["download"] == ["vitlens-relevance.png", "vitlens-relevance.npz"]
    assert min(Image.open(io.BytesIO(picture)).size) > 500
    about = json.loads(str(np.load(io.BytesIO(arrays))["about"]))
    assert "σ" in about["words"] and about["target"] == "predicted" and not {"layer", "head", "row"} & set(about)


def test_captum_is_asked_for_by_name(explorer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "captum", None)
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(ValueError, match="captum, which is not installed. Install it .`pip install captum`"):
        explorer.set(view="occlusion")
    assert explorer.state["view"] == "attention"


def test_without_a_readout_a_click_on_a_class_shows_what_needs_none(vit):
    explorer = widgets.explore(vit(global_pool="max", class_token=False), PICTURE)
    number = explorer.frame["bars"][1]["number"]
    assert browser(explorer, {"why": number}) == ""
    assert explorer.state["view"] == "legrad" and explorer.state["target"] == number
    views = next(control for control in explorer.controls() if control.name == "view")
    assert "relevance" not in [name for _, name in views.options]
