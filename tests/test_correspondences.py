"""Patches that two pictures have in common, in `compare`, against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity
from test_explorer import PICTURE, browser, selected, values, words

from vitlens import tokens, widgets
from vitlens.images import samples
from vitlens.models import preprocess


def cosines(model, layer, first, second):
    """(P, P) cosines of the patches of two pictures after a layer."""
    with torch.no_grad():
        found = [
            tokens.features(model, preprocess(model, each, size=model.patch_embed.img_size))[0][layer][0]
            for each in (first, second)
        ]
    return cosine_similarity(*(each[model.num_prefix_tokens :].double() for each in found))


@pytest.mark.parametrize("reg_tokens", [0, 2])
def test_nearest_patches_are_those_of_scikit_learn(vit, reg_tokens):
    model, other = vit(reg_tokens=reg_tokens, img_size=128), samples()["coffee"]
    page = widgets.compare(model, image=PICTURE, other=other)
    page.set(view="correspondences", layer_left=1, row=2, column=5)
    known = cosines(model, 1, PICTURE, other)
    asked, best = 2 * 8 + 5, known.argmax(1)
    assert selected(page) == [(2, 5), divmod(int(best[asked]), 8)]
    np.testing.assert_allclose(values(page, "left"), known.max(1).reshape(8, 8), atol=1e-5)
    np.testing.assert_allclose(values(page, "right"), known[asked].reshape(8, 8), atol=1e-5)
    mutual = {(patch, int(best[patch])) for patch in range(64) if known[:, best[patch]].argmax() == patch}
    points = [panel["points"] for panel in page.frame["panels"]]
    found = {(a[0] * 8 + a[1], b[0] * 8 + b[1]) for a, b in zip(*points, strict=True)}
    assert found <= mutual and len(found) == min(40, len(mutual)) > 1
    assert all(a[2] == b[2] for a, b in zip(*points, strict=True)) and len({a[2] for a in points[0]}) == len(points[0])
    assert f"{len(mutual)} mutual pairs" in words(page)
    for patch in (next(iter(mutual))[0], next(p for p in range(64) if p not in {a for a, _ in mutual})):
        browser(page, {"pick": "left", "row": patch // 8, "col": patch % 8})
        assert ("a mutual pair" in words(page)) == (patch in {a for a, _ in mutual})
    browser(page, {"pick": "right", "row": 7, "col": 1})
    assert selected(page) == [divmod(int(known[:, 57].argmax()), 8), (7, 1)]
    np.testing.assert_allclose(values(page, "left"), known[:, 57].reshape(8, 8), atol=1e-5)
    np.testing.assert_allclose(values(page, "right"), known.max(0).reshape(8, 8), atol=1e-5)


def test_two_models_have_no_patches_in_common(vit):
    for other in (vit(seed=1), vit(img_size=128)):
        page = widgets.compare(vit(), other, PICTURE)
        before = values(page, "right")
        message = browser(page, {"set": {"view": "correspondences"}})
        assert "within one model" in message and message.endswith(".") and page.state["view"] == "attention"
        np.testing.assert_array_equal(values(page, "right"), before)


def test_one_picture_is_told_from_two(vit):
    page = widgets.compare(vit(), image=PICTURE)
    page.set(view="correspondences", row=1, column=2)
    assert "Both sides show one picture" in words(page) and selected(page) == [(1, 2), (1, 2)]
    page.set(other="coffee")
    assert "Both sides" not in words(page)
    assert not next(c["disabled"] for c in page.frame["controls"] if c["name"] == "layer_left")
    assert next(c["disabled"] for c in page.frame["controls"] if c["name"] == "layer_right")


def test_the_other_picture_is_seen_by_the_other_model(vit):
    left, right, other = vit(), vit(seed=1), samples()["coffee"]
    page = widgets.compare(left, right, PICTURE, other)
    page.set(view="norms")
    with torch.no_grad():
        layers, _ = tokens.features(right, preprocess(right, other, size=(64, 64)))
    np.testing.assert_allclose(values(page, "right"), tokens.norms(layers[2][0, 1:]).unflatten(0, (4, 4)), rtol=1e-5)
