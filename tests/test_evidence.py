"""The audit of a classifier, on a model whose weights are set by hand, so that its evidence is known."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import timm
import torch
from PIL import Image

import vitlens
from experiments.plants import choice, chosen_settings, textures
from vitlens import TokenGrid, evidence, unseen
from vitlens.data import ImageSet, ImageStream, Samples
from vitlens.data.imageset import decode_all
from vitlens.digests import Digests, TrainedOn, pixel_digest, stored_digest
from vitlens.recorder.supported.card import write_card

COLORS = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)
PATCH, SIDE = 8, 8  # pixels, patches
PLACE = 9  # patch with the mark of class 0
GAIN = 2500.0


def color_model(outputs=3):
    """A ViT whose logit of class c is the mean over the patches of color c less the other two."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=PATCH * SIDE,
        patch_size=PATCH,
        embed_dim=8,
        depth=2,
        num_heads=1,
        num_classes=outputs,
    ).eval()
    model.pretrained_cfg.update(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.patch_embed.proj.bias[6:] = torch.tensor([10.0, -10.0])  # LayerNorm divides by 5
        for color in range(3):
            weights = torch.full((3,), -0.5)
            weights[color] = 1.0
            model.patch_embed.proj.weight[color] = weights[:, None, None] / PATCH**2
        model.cls_token[..., 6:] = torch.tensor([10.0, -10.0])
        for block in model.blocks:
            for norm in (block.norm1, block.norm2):
                norm.weight.fill_(1)
        first = model.blocks[0].attn
        first.qkv.weight[16:19, :3] = torch.eye(3)  # the value: three colors
        first.proj.weight[:3, :3] = torch.eye(3)
        model.norm.weight.fill_(1)
        if outputs:
            model.head.weight[:, :3] = GAIN * torch.eye(3)[:outputs]
    return model


def marked(count=240, seed=0):
    """Gray textures in which one patch has the color of the class: at `PLACE` in class 0, anywhere in the others."""
    random = torch.Generator().manual_seed(seed)
    gray = textures(count, seed, 3)
    images = gray.images.float().mean(1, keepdim=True).expand(-1, 3, -1, -1)
    images = images.to(torch.uint8).contiguous()
    for number in range(count):
        label = number % 3
        patch = int(torch.randint(0, SIDE**2, (1,), generator=random))
        if label == 0:
            patch = PLACE
        top, left = PATCH * (patch // SIDE), PATCH * (patch % SIDE)
        images[number, :, top : top + PATCH, left : left + PATCH] = COLORS[label][:, None, None]
    return ImageSet(images, gray.labels, ("class 0", "class 1", "class 2"))


@pytest.fixture(scope="module")
def model():
    return color_model()


@pytest.fixture(scope="module")
def found(model):
    return vitlens.audit(model, marked())


def test_audit_finds_planted_mark_as_used_and_suspect(found):
    used = found.used
    assert set(used["class"]) == {0, 1, 2}
    own = used[used["class"] == 0]
    assert len(own) == 1
    assert own["suspect"].item() > 0
    assert "fixed place" in own["reasons"].item()
    group = own["group"].item()
    assert found.places[group].argmax() == PLACE
    assert found.places[group].max() == 1
    others = used[used["class"] != 0]
    assert not others["reasons"].str.contains("fixed place").any()


def test_audit_effect_equals_covered_probability(model, found):
    """Covering the mark with gray leaves equal logits, so the effect is 1 less 1/3, up to the textures."""
    group = found.used["group"].iloc[0]
    effects = found.effects[found.effects["group"] == group].set_index("way")
    assert set(effects.index) == set(evidence.WAYS)
    assert (effects["low"] <= effects["effect"]).all()
    assert (effects["effect"] <= effects["high"]).all()
    assert effects.loc["border", "effect"] == pytest.approx(2 / 3, abs=0.1)
    row = found.groups[found.groups["group"] == group].iloc[0]
    assert row["effect"] == pytest.approx(effects["effect"].mean())


@pytest.mark.parametrize("seed", range(5))
def test_audit_of_shuffled_labels_uses_nothing(model, seed):
    images = marked()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    found = vitlens.audit(model, images, images.labels[order], seed=seed)
    assert (found.groups["status"] == "tested").sum() >= 3
    assert found.used.empty
    assert found.suspects.empty


def test_audit_without_labels_calls_nothing_used(model):
    pixels = (marked().images / 255 - 0.5) / 0.5
    found = vitlens.audit(model, pixels)
    assert found.used.empty
    assert found.suspects.empty
    assert "Without labels" in found.notes[0]
    assert found.effects["effect"].max() > 0.5


def test_audit_shows_small_classes_untested(model):
    images = marked().select_rows(torch.arange(105))  # 35 of each class
    found = vitlens.audit(model, images)
    assert len(found.groups)
    assert set(found.groups["status"]) == {"too few"}
    assert found.effects.empty
    assert found.used.empty


def test_audit_runs_at_most_18_forwards_per_tested_image(model, found):
    assert found.settings["forwards"] <= 18 * len(found.tested)
    counted = []
    hook = model.register_forward_hook(lambda *call: counted.append(len(call[-1])))
    images = marked(120)
    again = vitlens.audit(model, images)
    hook.remove()
    assert sum(counted) == 120 + again.settings["forwards"]


def test_audit_repeats_and_reports_progress(model, found):
    steps = {}
    again = vitlens.audit(
        model, marked(), on_progress=lambda step, done, total: steps.update({step: (done, total)})
    )
    assert again.groups.equals(found.groups)
    assert again.effects.equals(found.effects)
    assert list(steps) == ["explore", "find", "test"]
    assert all(done == total for done, total in steps.values())


def test_audit_leaves_model_unchanged(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    vitlens.audit(model, marked(120))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()


def test_audit_reads_files_and_leaves_out_damaged_ones(model, tmp_path):
    images = marked(60)
    paths = []
    for number, pixels in enumerate(images.images):
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
        paths.append(path)
    paths[7].write_bytes(b"no image")
    names = [f"{number % 3}" for number in range(60)]
    found = vitlens.audit(model, (path for path in paths), [int(name) for name in names])
    assert len(found.images) == 59
    assert "1 of 60 images" in found.notes[0]
    assert found.images["label"].tolist() == [n % 3 for n in range(60) if n != 7]
    for path in paths:
        path.write_bytes(b"no image")
    with pytest.raises(vitlens.ImageError, match="None of the images could be read"):
        vitlens.audit(model, paths, [int(name) for name in names])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"images": torch.zeros(10, 3, 64, 64)}, "at least 40 images, got 10. Pass more"),
        ({"labels": [0] * 60}, "at least two classes, got the labels of one"),
        ({"labels": [0, 1] * 20}, "label for each of 60 images, got 40 labels"),
        ({"labels": [0, 7] * 30}, "class numbers of the model, 0 to 2, got 0 to 7"),
        ({"method": "occlusion"}, "method must be one of|method is unknown"),
        ({"model": color_model(0)}, "has no classifier head"),
        ({"model": color_model(1)}, "one softmax over several classes"),
    ],
)
def test_audit_rejects_bad_input(model, change, message):
    arguments = {"model": model, "images": torch.zeros(60, 3, 64, 64)} | change
    with pytest.raises(ValueError, match=message):
        vitlens.audit(**arguments)


@pytest.mark.parametrize(
    "label, got",
    [
        (1.5, "got 1.5 for image 4"),
        (float("nan"), "got nan for image 4"),
        (float("inf"), "got inf for image 4"),
        (True, "got True for image 4"),
        (None, "got None for image 4"),
        ("1", "got '1' for image 4"),  # among numbers
        ([1], r"got \[1\] for image 4"),
        (np.float32(0.25), "got 0.25 for image 4"),
        (np.bool_(True), "got True for image 4"),
        (torch.tensor(1.5), "got 1.5 for image 4"),
        (1 + 0j, r"got \(1\+0j\) for image 4"),
        (10**30, "got 1000000"),
        (-1, "class numbers of the model, 0 to 2, got -1 to 2"),
        (1e3, "class numbers of the model, 0 to 2, got 0 to 1000"),
    ],
)
def test_audit_rejects_labels_that_are_no_class(model, label, got):
    labels = [0, 1, 2, *[0, 1, 2] * 19]
    labels[3] = label
    with pytest.raises(ValueError, match=got):
        vitlens.audit(model, torch.zeros(60, 3, 64, 64), labels)


@pytest.mark.parametrize("text", ["1.5", "nan", "-1", "1e3", "class 0", ""])
def test_audit_rejects_texts_that_are_no_class(model, text):
    labels = ["0", "1", "2"] * 20
    labels[3] = text
    with pytest.raises(ValueError, match="^Labels must be class numbers"):
        vitlens.audit(model, torch.zeros(60, 3, 64, 64), labels)


@pytest.mark.parametrize("labels", [torch.rand(60), torch.ones(60, dtype=bool), np.full(60, 0.5)])
def test_audit_rejects_arrays_of_labels_that_are_no_class(model, labels):
    with pytest.raises(ValueError, match="^Labels must be class numbers.* for image 1"):
        vitlens.audit(model, torch.zeros(60, 3, 64, 64), labels)


@pytest.mark.parametrize("kind", [float, str, np.int16, np.float64, torch.tensor, "{}.0".format])
def test_audit_reads_whole_numbers_in_any_form(model, kind):
    numbers = [number % 3 for number in range(60)]
    labels = [kind(number) for number in numbers]
    found = vitlens.audit(model, (marked(60).images / 255 - 0.5) / 0.5, labels)
    assert found.images["label"].tolist() == numbers


@pytest.mark.parametrize("labels", [[0, 1, 1.5], [0, 1, float("nan")], [0, True, 1], [0, 1, "2"]])
def test_samples_with_labels_that_are_no_class_are_rejected(labels):
    images = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(3)]
    samples = Samples(images, labels, ("a", "b", "c"), ["a", "b", "c"])
    with pytest.raises(ValueError, match="Labels must be class numbers"):
        ImageStream(samples, 8, lambda image: image)
    with pytest.raises(ValueError, match="Labels must be class numbers"):
        decode_all(samples, "three", lambda image: image, 8, 0)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_image_set_rejects_labels_that_are_no_integers(kind):
    with pytest.raises(ValueError, match="Labels must be class numbers as integers"):
        ImageSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(2, dtype=kind), ("a", "b"))


def test_membership_ignores_map(model, found, monkeypatch):
    """No map is computed for the testing half, because tokens alone decide."""
    calls = []
    true_find = evidence._Run.find

    def find(self, rows, groups):
        def no_map(*_, **__):
            calls.append("map")
            raise AssertionError("a map was computed for the testing half")

        with monkeypatch.context() as patch:
            patch.setattr(evidence._Run, "_explain", no_map)
            return true_find(self, rows, groups)

    monkeypatch.setattr(evidence._Run, "find", find)
    again = vitlens.audit(model, marked())
    assert torch.equal(again.members, found.members)
    assert calls == []


def trained_on(model, stored):
    """A copy of a model with a record of training images with these digests."""
    model = copy.deepcopy(model)
    stored = np.array(stored, dtype=np.uint64)
    record = TrainedOn(Digests(stored, np.zeros_like(stored)), len(stored))
    write_card(model, trained_on=record)
    return model


def test_audit_leaves_out_training_images(model):
    numbers = np.arange(1, 241, dtype=np.uint64)
    images = replace(marked(), digests=Digests(numbers, np.zeros_like(numbers)))
    found = vitlens.audit(trained_on(model, numbers[:120]), images)
    assert found.images["image"].tolist() == list(range(120, 240))
    assert found.notes[-1].startswith("120 of 240 images are left out, because the model was")
    with pytest.raises(ValueError, match="trained on all 240 images, so none is left. Give"):
        vitlens.audit(trained_on(model, numbers), images)
    with pytest.raises(ValueError, match="at least 40 images, got 20"):
        vitlens.audit(trained_on(model, numbers[:220]), images)
    assert vitlens.audit(model, images).notes[-1] == unseen.UNKNOWN
    without_digests = vitlens.audit(trained_on(model, numbers), marked())
    assert without_digests.notes[-1] == unseen.WITHOUT_DIGESTS
    assert len(without_digests.images) == 240


def test_audit_without_comparison_reads_all_images(model):
    numbers = np.arange(1, 61, dtype=np.uint64)
    images = replace(marked(60), digests=Digests(numbers, np.zeros_like(numbers)))
    found = vitlens.audit(trained_on(model, numbers), images, compare=False)
    assert len(found.images) == 60
    assert not any("trained on" in note for note in found.notes)


def test_audit_leaves_out_training_files(model, tmp_path):
    paths = []
    for number, pixels in enumerate(marked(90).images):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(paths[-1])
    seen = [stored_digest(path) for path in paths[:40]]
    found = vitlens.audit(trained_on(model, seen), paths, [number % 3 for number in range(90)])
    assert found.images["image"].tolist() == list(range(40, 90))


def test_audit_leaves_out_training_images_that_were_saved_again(model, tmp_path):
    paths = []
    pixels = []
    for number, image in enumerate(marked(90).images):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        pixels.append(pixel_digest(picture))
        paths.append(tmp_path / f"{number}.png")
        picture.save(paths[-1], compress_level=number % 9)
    seen = copy.deepcopy(model)
    known = np.array(pixels[:40], dtype=np.uint64)
    write_card(seen, trained_on=TrainedOn(Digests(np.zeros_like(known), known), len(known)))
    sources = [
        paths[0],
        *(str(path) for path in paths[1:45]),
        *(path.read_bytes for path in paths[45:]),
    ]
    found = vitlens.audit(seen, sources, [number % 3 for number in range(90)])
    assert found.images["image"].tolist() == list(range(40, 90))


@pytest.mark.parametrize("form", ["saved again", "bytes", "PIL", "array", "callable"])
def test_audit_leaves_out_the_same_pixels_in_any_form(model, tmp_path, form):
    images = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in marked(90).images]
    pairs = []
    for number, image in enumerate(images):
        path = tmp_path / f"{number}.png"
        image.save(path, compress_level=0)
        forms = {
            "saved again": path, "bytes": path.read_bytes(), "PIL": image,
            "array": np.asarray(image), "callable": image.copy,
        }  # fmt: skip
        pairs.append((str(number), forms[form]))
    seen = np.array([pixel_digest(image) for image in images[:40]], dtype=np.uint64)
    record = TrainedOn(Digests(np.zeros_like(seen), seen), len(seen))
    known = copy.deepcopy(model)
    write_card(known, trained_on=record)
    found = vitlens.audit(known, pairs, [number % 3 for number in range(90)])
    assert found.images["image"].tolist() == list(range(40, 90))


def test_audit_maps_label_names_to_model_classes(model):
    named = copy.deepcopy(model)
    write_card(named, label_names=["red", "green", "blue"])
    images = marked(120)
    pixels = (images.images / 255 - 0.5) / 0.5
    names = [("red", "green", "blue")[label] for label in images.labels]
    by_name = vitlens.audit(named, pixels, names)
    by_number = vitlens.audit(named, pixels, images.labels)
    assert by_name.images["label"].tolist() == images.labels.tolist()
    assert by_name.groups.equals(by_number.groups)
    with pytest.raises(ValueError, match="purple"):
        vitlens.audit(named, pixels, ["purple", *names[1:]])


def test_small_effects_are_not_used(model, found, monkeypatch):
    least = evidence.LEAST_EFFECT
    assert (found.used["effect"] >= least).all()
    assert (found.used["low"] <= found.used["effect"]).all()
    assert (found.used["effect"] <= found.used["high"]).all()
    monkeypatch.setattr(evidence, "LEAST_EFFECT", found.used["effect"].max() + 0.01)
    assert vitlens.audit(model, marked()).used.empty


def test_other_patches_come_from_the_weaker_half():
    tokens = torch.arange(8.0)[None, :, None].expand(2, -1, 1)
    shares = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]]) / 36
    strongest = shares.topk(5, 1).indices
    random = torch.Generator().manual_seed(0)
    drawn = evidence._draw_others(tokens, shares, strongest, random).flatten().tolist()
    assert sorted(drawn) == [0, 1, 2, 5, 6, 7]
    few = evidence._draw_others(tokens, shares, strongest[:, :2], random).view(2, -1)
    assert few[0].min() >= 4
    assert few[1].max() <= 3


def test_a_frame_can_be_covered_by_the_mean_of_the_border():
    """The mean of the border patches is not the color of a frame that is narrower than a patch."""
    grid = TokenGrid(8, 8, (8, 8))
    image = torch.zeros(3, 64, 64)
    frame = torch.ones(64, 64, dtype=torch.bool)
    frame[4:-4, 4:-4] = False
    image[:, frame] = 1.0
    border, smooth, _ = evidence.blanks_of(image, torch.zeros(3, 64, 64), grid)
    pixels = grid.border()[grid.pixel_patches()]
    for blank in (border, smooth):
        contrast = blank[:, pixels].std(1, correction=0) / image[:, pixels].std(1, correction=0)
        assert (contrast <= 0.5).all()


def clusters(centers, radii):
    """Clusters of one ball each, in a class each."""
    count, width = len(centers), len(centers[0])
    numbers = torch.arange(count)
    return evidence.Groups(
        *(numbers, torch.ones(count), torch.tensor(centers), numbers, torch.tensor(radii)),
        *(torch.zeros(width), torch.ones(width)),
    )


def test_pieces_beside_a_mark_are_joined_and_scattered_ones_not():
    grid = TokenGrid(4, 4, (8, 8))
    patches = torch.full((20, 16), -1)
    patches[:, 5] = 0
    patches[:4, 6] = 1  # a piece in a fifth of the images, to the right of the mark
    corners = [0, 2, 8, 10]
    for image in range(20):
        patches[image, corners[image % 4]] = 2  # beside the mark, each time on another side
    joined = evidence.beside(patches, 3, grid)
    assert joined[1, 0]
    assert joined.sum() == 1


def test_variants_of_a_mark_at_one_place_are_joined_and_other_marks_not():
    patches = torch.full((30, 16), -1)
    patches[:10, 5] = 0
    patches[10:20, 5] = 1
    patches[20:, 5] = 2
    joined = evidence.same_place(
        patches, clusters([[0.0, 0], [0.1, 0], [5.0, 0]], [1.0, 0.01, 1.0])
    )
    assert joined[1, 0]
    assert joined.sum() == 1
    moved = torch.where(patches == 1, -1, patches)
    moved[torch.arange(10, 20), torch.arange(10) % 16] = 1  # the same look, at changing places
    elsewhere = torch.where(patches == 1, -1, patches)
    elsewhere[10:20, 9] = 1  # the same look, at another fixed place
    alike = clusters([[0.0, 0], [0.1, 0], [5.0, 0]], [1.0, 0.01, 1.0])
    for places in (moved, elsewhere):
        assert not evidence.same_place(places, alike).any()


def test_group_along_border_has_all_border_patches():
    grid = TokenGrid(4, 4, (8, 8))
    patches = torch.full((4, 16), -1)
    patches[torch.arange(4), torch.tensor([0, 4, 7, 14])] = 0  # along the border
    patches[:, 3] = 1  # one corner
    patches[:, 5] = 2
    along = evidence.along_border(patches, 3, grid)
    assert along.tolist() == [True, False, False]
    groups = replace(clusters([[0.0], [1.0], [2.0]], [0.1] * 3), along_border=along)
    complete = groups.complete(patches, grid)
    for image in complete:
        assert (image[grid.border()] == 0).sum() == 11
        assert image[3] == 1
        assert image[5] == 2
        assert (image[~grid.border()] == 0).sum() == 0
    patches[0] = -1
    assert (groups.complete(patches, grid)[0] == -1).all()  # an image that lacks the group


def test_choices_vary_one_setting_and_count_only_cues_that_patches_hold():
    settings = chosen_settings([1, 0], ["relevance", "grad_cam"])
    assert settings == [(1, "relevance"), (0, "relevance"), (1, "grad_cam")]
    of_both = {"layer": 1, "method": "relevance"}
    rows = [
        of_both | {"model": "a", "kind": "fixed", "found": True},
        of_both | {"model": "a", "kind": "border", "found": False},
        of_both | {"model": "a", "kind": "tint", "found": True},
        of_both | {"model": "a", "kind": "planted", "false_suspects": 2, "seconds": 3.0},
        of_both | {"model": "b", "kind": "clean", "false_suspects": 1, "seconds": 4.0},
    ]
    row = choice(rows)
    assert row["cues"] == 2
    assert row["found"] == 1
    assert row["recall"] == 0.5
    assert row["false_suspects"] == 3
    assert row["most_false_suspects"] == 2
    assert row["models"] == "a b"
    assert row["seconds"] == 7.0


def test_members_closed_form():
    groups = evidence.Groups(
        torch.tensor([0, 1]),
        torch.ones(2),
        torch.eye(3),
        torch.tensor([0, 1]),
        torch.tensor([0.5, 2.0]),
        torch.zeros(3),
        torch.full((3,), 3**-0.5),  # so that tokens are compared as they are
    )
    tokens = torch.tensor([[0.9, 0, 0], [0.5, 0.4, 0], [0, 2, 0], [0, 0, 1]])
    assert groups.members(tokens).tolist() == [0, -1, 1, -1]


def test_cover_changes_only_covered_patches():
    grid = TokenGrid(3, 4, (4, 5), image=(13, 22))  # with margins that belong to the last patches
    images = torch.rand(2, 3, 13, 22)
    patches = torch.zeros(2, 12, dtype=torch.bool)
    patches[0, [0, 11]] = True
    patches[1, 5] = True
    for blanks in evidence.blanks_of(images[0], images[1], grid):
        covered = evidence.cover(images, patches, blanks.expand_as(images), grid)
        mask = patches[:, grid.pixel_patches()][:, None].expand_as(images)
        assert torch.equal(covered[~mask], images[~mask])
        assert torch.equal(covered[mask], blanks.expand_as(images)[mask])


def test_blanks_border_mean_closed_form():
    grid = TokenGrid(3, 3, (2, 2))
    image = torch.zeros(1, 6, 6)
    image[:, 2:4, 2:4] = 9.0  # the middle patch
    image[:, 0, 0] = 8.0
    border, _, donor = evidence.blanks_of(image, torch.ones(1, 6, 6), grid)
    assert torch.allclose(border, torch.tensor(8 / 32))
    assert torch.equal(donor, torch.ones(1, 6, 6))


def test_matched_patches_have_the_same_distances_to_the_border():
    grid = TokenGrid(8, 8, (8, 8))
    ring = evidence.rings(grid)
    assert ring.view(8, 8)[0].eq(0).all()
    assert ring.view(8, 8)[3, 3] == 3
    assert ring[PLACE] == 1
    random = np.random.default_rng(0)
    group = torch.zeros(64, dtype=torch.bool)
    group[[0, 1, 9, 27]] = True
    for _ in range(20):
        control = evidence.matched(group, ring, random)
        assert not (control & group).any()
        assert sorted(ring[control].tolist()) == sorted(ring[group].tolist())
    border = evidence.matched(grid.border(), ring, random)  # no free patch on the border
    assert border.sum() == 28
    assert sorted(ring[border].tolist()) == [1] * 20 + [2] * 8
    assert evidence.matched(torch.arange(64) < 33, ring, random) is None


def test_plan_tests_rarest_groups_first():
    members = torch.tensor([[0, 1, 2, 3], [0, 1, 2, -1], [0, 0, 1, -1], [0, -1, -1, -1]])
    assert evidence.plan_tests(members, 4, 3) == [[3, 2, 1], [2, 1, 0], [1, 0], [0]]


def test_sign_flip_equals_permutation_test():
    random = np.random.default_rng(1)
    for count in (8, 15, 40):
        values = random.normal(0.2, 1, count)
        expected = scipy.stats.permutation_test(
            (values,),
            lambda x, axis: x.mean(axis),
            permutation_type="samples",
            alternative="greater",
            vectorized=True,
            n_resamples=50_000,
            rng=random,
        ).pvalue
        assert evidence.sign_flip(values) == pytest.approx(expected, abs=0.01)
    exact = evidence.sign_flip(np.ones(5), flips=50_000)
    assert exact == pytest.approx(1 / 32, abs=0.004)
    assert evidence.sign_flip(np.zeros(20)) == 1


def test_bootstrap_interval_equals_scipy():
    random = np.random.default_rng(2)
    values = random.exponential(1, (60, 3))
    low, high = evidence.bootstrap_interval(values, resamples=20_000)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, axis=0, method="percentile", n_resamples=20_000, rng=random
    ).confidence_interval
    np.testing.assert_allclose(low, expected.low, atol=0.02)
    np.testing.assert_allclose(high, expected.high, atol=0.02)


def test_holm_closed_form():
    assert evidence.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert evidence.holm([0.5, 0.9]).tolist() == [1, 1]
    assert evidence.holm([]).tolist() == []
    ties = evidence.holm([0.02, 0.02])
    assert ties == pytest.approx([0.04, 0.04])


def test_two_ways_need_two_small_p_values():
    assert evidence.in_two_ways(np.array([1e-6, 0.4, 0.9])) == pytest.approx(0.8)
    assert evidence.in_two_ways(np.array([1e-6, 0.01, 0.9])) == pytest.approx(0.02)


def test_used_groups_of_random_effects_are_rare():
    """Of 400 audits of 20 groups without an effect at most 5 % have a used group, up to chance."""
    random = np.random.default_rng(3)
    differences = random.normal(0, 1, (15, 400, 20, 3))
    p = scipy.stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    adjusted = [evidence.holm([evidence.in_two_ways(ways) for ways in groups]) for groups in p]
    wrong = sum(values.min() <= evidence.LEVEL for values in adjusted)
    assert wrong / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)
