"""What mirrored and turned pictures change is measured by its definition, and nothing once it is averaged out."""

from dataclasses import replace

import pytest
import timm
import torch

from vitlens import attention, capture
from vitlens.evaluate import change_under
from vitlens.train import recipe

torch.set_num_threads(1)
BASE = replace(recipe("digits").tiny(), image_size=32, patch_size=8, width=24, depth=2, heads=2)


def images(*shape):
    return torch.randn(*(shape or (3, 3, 32, 32)), generator=torch.Generator().manual_seed(0)).double()


def made(**settings):
    model = replace(BASE, **settings).build().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if "pos" in name else 4.0 if "blocks" in name else 1.0)
    return model


def seen(model, x):
    with torch.no_grad(), capture(model.eval()) as attn:
        logits = model(x)
    return logits, attention.rollout(attn)


def test_the_change_before_averaging_is_that_of_its_definition():
    model, x = made(), images()
    found = change_under("flips", model, x)["before"]
    (straight, map_), (mirrored, other) = seen(model, x), seen(model, x.flip(-1))
    logits, classes, maps = [], 0, []
    for image in range(3):
        a, b = straight[image] - straight[image].mean(), mirrored[image] - mirrored[image].mean()
        logits.append((((a - b) ** 2).sum() / (a**2).sum()).sqrt().item())
        classes += int(a.argmax() != b.argmax())
        one, two = map_[image] / map_[image].sum(), other[image].flip(1) / other[image].sum()
        maps.append((one - two).clamp(min=0).sum().item())  # what is here and not there
    assert found.logits == pytest.approx(sum(logits) / 3) and found.logits > 0.01
    assert found.classes == pytest.approx(classes / 3)
    assert found.maps == pytest.approx(sum(maps) / 3) and found.maps > 0.001


@pytest.mark.parametrize("group", ["flips", "rotations"])
@pytest.mark.parametrize("built_in", [True, False])
def test_nothing_changes_after_averaging(group, built_in):
    x = images()
    model = made(equivariance=group, readout="attention-pool") if built_in else made(readout="attention-pool")
    model.train()
    found = change_under(group, model, x)
    assert found["before"].logits > 0.01 and found["before"].maps > 1e-4
    assert found["after"].logits < 1e-10 and found["after"].classes == 0 and found["after"].maps < 1e-10
    assert model.training and getattr(model, "equivariance", "none") == (group if built_in else "none")


def test_a_model_that_averages_over_one_group_is_not_symmetric_under_what_is_in_another():
    """Its own logits are asked for: a mirror image of a quarter turn is no quarter turn."""
    model = made(equivariance="flips")
    with torch.no_grad():
        model.eval()
        assert (model(images().rot90(1, (2, 3))) - model(images())).norm() > 0.01
    before = change_under("rotations", model, images())["before"]
    model.equivariance = "none"
    assert before == change_under("rotations", model, images())["before"]


def test_a_bag_of_mirrored_patches_is_symmetric_before():
    model = made(positions="none", readout="mean")
    with torch.no_grad():
        weight = model.patch_embed.proj.weight
        weight.copy_((weight + weight.flip(-1)) / 2)
    found = change_under("flips", model, images())["before"]
    assert found.logits < 1e-10 and found.maps < 1e-10
    assert change_under("rotations", model, images())["before"].logits > 0.01


def test_a_model_without_maps_is_measured_by_its_logits():
    model = timm.create_model("resnet18", num_classes=10)
    found = change_under("rotations", model, images(2, 3, 32, 32).float())
    assert found["before"].maps is None and found["before"].logits > 0 and found["after"].logits < 1e-4


@pytest.mark.parametrize("group, shape, message", [
    ("shifts", (1, 3, 32, 32), "one of flips, rotations, got 'shifts'"),
    ("none", (1, 3, 32, 32), "one of flips, rotations, got 'none'"),
    ("rotations", (1, 3, 32, 24), "square images, got 32 × 24 pixels"),
    ("flips", (1, 3, 24, 24), "does not take this size"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(group, shape, message):
    with pytest.raises(ValueError, match=message):
        change_under(group, made(), images(*shape))
