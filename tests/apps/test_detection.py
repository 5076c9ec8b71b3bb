"""Detection without torchvision: drawn shapes, average precision, and refused options."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from mpikfac_apps.detection import precision, shapes, train
from mpikfac_apps.detection.precision import Tally
from mpikfac_apps.detection.train import DetectionOptions

pytestmark = pytest.mark.lab

# -- shapes --------------------------------------------------------------------------------------


def test_shapes_have_the_usual_areas():
    """Oracle: pixels counted by hand, and the areas of geometry."""
    rows = ["".join(".#"[pixel] for pixel in row) for row in shapes.shape("triangle", 6, 2, (3, 3))]
    assert rows == ["......", "......", "..##..", "..##..", ".####.", "......"]
    areas = {"circle": math.pi, "square": 4.0, "triangle": 2.0}
    for name, area in areas.items():
        mask = shapes.shape(name, 200, 80, (100, 100))
        assert float(mask.sum()) / 80**2 == pytest.approx(area, rel=0.01)


def test_boxes_are_the_smallest_boxes():
    """Oracle: by hand; pixels from row 1 to row 3 and from column 2 to column 6."""
    mask = torch.zeros(2, 8, 8, dtype=torch.bool)
    mask[0, 1, 2] = mask[0, 3, 6] = mask[1, 7, 7] = True
    assert shapes.boxes_of(mask).tolist() == [[2, 1, 7, 4], [7, 7, 8, 8]]


def test_a_picture_shows_its_target():
    """Oracle: noise is dark and shapes are bright; shapes lie apart, each inside its box."""
    labels = []
    for picture, target in shapes.Shapes(range(40), 48, seed=3):
        masks = target["masks"]
        assert torch.equal(masks.sum(0), (picture.amax(0) >= shapes.BRIGHT).long())
        for mask, (left, top, right, bottom) in zip(masks, target["boxes"].int().tolist()):
            assert mask[top:bottom, left:right].sum() == mask.sum()
            assert 11 <= right - left <= 24 and 11 <= bottom - top <= 24
        labels += target["labels"].tolist()
        assert 1 <= len(masks) == len(target["labels"]) == len(target["boxes"]) <= shapes.MOST
    assert set(labels) == {1, 2, 3}


def test_a_picture_depends_on_number_and_seed_alone():
    """Oracle: the same number in another range; another number, another seed."""
    first = shapes.Shapes(range(10), 32, seed=1)[6][0]
    assert torch.equal(first, shapes.Shapes(range(0, 100, 3), 32, seed=1)[2][0])
    assert not torch.equal(first, shapes.Shapes(range(10), 32, seed=1)[7][0])
    assert not torch.equal(first, shapes.Shapes(range(10), 32, seed=2)[6][0])


# -- average precision -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judged", "count", "expected"),
    [
        ([(0.9, True), (0.8, False), (0.7, True)], 3, (1 + 2 / 3) / 3),
        ([(0.7, True), (0.8, False), (0.9, True)], 3, (1 + 2 / 3) / 3),  # in any order
        ([(0.9, False), (0.8, True), (0.7, True)], 2, 2 / 3),  # a later precision is better
        ([(0.9, True), (0.9, False)], 1, 1 / 2),  # of equal scores the wrong one counts first
        ([(0.9, True), (0.8, True)], 2, 1.0),
        ([(0.9, False)], 2, 0.0),
        ([], 2, 0.0),
    ],
)
def test_average_precision(judged, count, expected):
    """Oracle: by hand."""
    assert Tally(judged, count).average_precision == pytest.approx(expected)


def test_a_shape_is_found_once():
    """Oracle: by hand; the second detection of a shape is wrong, unless it overlaps another."""
    overlaps = torch.tensor([[0.9, 0.0], [0.8, 0.6], [0.7, 0.55], [0.4, 0.49]])
    assert precision.right(overlaps) == [True, True, False, False]
    assert precision.right(torch.zeros(2, 0)) == [False, False]


def test_classes_are_judged_apart_and_pictures_together():
    """Oracle: by hand; class 3 has no shape and does not count."""
    first = precision.tallied(
        {"scores": torch.tensor([0.5, 0.9, 0.8]), "labels": torch.tensor([1, 1, 2])},
        {"labels": torch.tensor([1, 2])},
        torch.tensor([[0.9, 0.0], [0.6, 0.0], [0.9, 0.2]]),
    )
    assert first[1] == Tally([(pytest.approx(0.9), True), (0.5, False)], 1)
    assert first[2] == Tally([(pytest.approx(0.8), False)], 1)
    second = {2: Tally([(0.7, True)], 1), 3: Tally([(0.6, False)], 0)}
    total = precision.merged([first, second])
    assert total[2].average_precision == pytest.approx(1 / 4)
    assert precision.mean_average_precision(total) == pytest.approx((1 + 1 / 4) / 2)
    assert math.isnan(total[3].average_precision)


def test_overlaps_of_boxes_and_of_full_masks():
    """Oracle: by hand; masks that fill the boxes."""
    boxes = torch.tensor([[0.0, 0, 4, 4], [2, 2, 6, 6], [6, 0, 8, 8]])
    expected = torch.tensor([[1, 4 / 28, 0], [4 / 28, 1, 0], [0, 0, 1]])
    torch.testing.assert_close(precision.overlaps_of_boxes(boxes, boxes), expected)
    masks = torch.zeros(3, 8, 8, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist()):
        mask[top:bottom, left:right] = True
    torch.testing.assert_close(precision.overlaps_of_masks(masks, masks), expected)


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model=vgg"], "model=vgg must be one of small, resnet50"),
        (["--size=16"], "size=16 must be a whole number >= 32"),
        (["--batch=9", "--images=8"], "options: batch=9 must not exceed the number of images (8)"),
        (["--kfac.lr=1"], "unknown key kfac.lr"),
    ],
)
def test_wrong_options_are_refused_in_one_line(arguments, text, capsys):
    """Oracle: the line."""
    with pytest.raises(SystemExit) as left:
        train.main(arguments)
    errors = capsys.readouterr().err
    assert left.value.code == 2
    assert text in errors and errors.count("\n") == 1


def test_a_batch_is_dealt_out_evenly():
    """Oracle: the text."""
    with pytest.raises(ValueError, match=r"batch=8 must be .* number of ranks \(3\)"):
        DetectionOptions().check(3)


def test_torchvision_is_asked_for_in_one_line(monkeypatch, capsys):
    """Oracle: the line; an import that fails."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    monkeypatch.setitem(sys.modules, "torchvision.models.detection", None)
    with pytest.raises(SystemExit) as left:
        train.main(["--device=cpu"])
    errors = capsys.readouterr().err
    assert left.value.code == 2 and errors.count("\n") == 1
    assert "detection needs a torchvision version that matches torch" in errors
