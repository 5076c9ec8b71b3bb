from __future__ import annotations

import pytest
import torch

from mpikfac_apps.options import by_epoch
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.training import batches
from mpikfac_apps.training.augmentation import moves

IMAGES = torch.randint(
    256, (50, 2, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
LABELS = torch.arange(50)
MOVED = moves.Augmentation()


def epoch_of(rank, ranks, epoch=0, seed=0, augment=MOVED):
    mine = batches.Batches(IMAGES, LABELS, 12, seed=seed, augment=augment, rank=rank, ranks=ranks)
    return [mine.get(epoch, index) for index in range(mine.calendar.at(epoch).steps)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_the_shares_of_all_ranks_are_the_global_batch_in_order(ranks):
    """Oracle: a single rank, which takes whole batches."""
    shares = [epoch_of(rank, ranks, epoch=3) for rank in range(ranks)]
    for index, (images, labels) in enumerate(epoch_of(0, 1, epoch=3)):
        assert torch.equal(torch.cat([share[index][0] for share in shares]), images)
        assert torch.equal(torch.cat([share[index][1] for share in shares]), labels)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_by_epoch_is_the_batch_of_a_run_of_the_same_size(ranks):
    """Oracle: constant batches of 6, 12 and 48 images, in the epochs that have these batches."""
    batch = by_epoch.read("6 until 1, 12 until 3, 48", int)
    for epoch, size in enumerate([6, 12, 12, 48, 48]):
        for rank in range(ranks):
            chosen = {"seed": 0, "augment": MOVED, "rank": rank, "ranks": ranks}
            growing, constant = (
                batches.Batches(IMAGES, LABELS, b, **chosen) for b in (batch, size)
            )
            steps = growing.calendar.at(epoch).steps
            assert steps == len(IMAGES) // size
            for index in range(steps):
                pairs = zip(growing.get(epoch, index), constant.get(epoch, index))
                assert all(torch.equal(found, expected) for found, expected in pairs)


def test_an_epoch_takes_no_image_twice_and_drops_the_partial_batch():
    labels = torch.cat([labels for _, labels in epoch_of(0, 1)])
    assert len(labels) == 48 == len(set(labels.tolist()))


def test_images_keep_their_labels():
    for images, labels in epoch_of(0, 1, augment=None):
        assert torch.equal(images, IMAGES[labels])


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(**chosen):
        return torch.cat([labels for _, labels in epoch_of(0, 1, **chosen)]).tolist()

    assert order() == order()
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_an_epoch_can_be_entered_in_the_middle():
    mine = batches.Batches(IMAGES, LABELS, 12, seed=0, augment=MOVED)
    assert torch.equal(mine.get(2, 3)[0], epoch_of(0, 1, epoch=2)[3][0])


@pytest.mark.parametrize("shift", [0, 2, 4])
def test_augmentation_moves_and_mirrors_each_image_as_drawn(shift):
    """Oracle: pixel by pixel."""
    n, _, height, width = IMAGES.shape
    draw = torch.Generator().manual_seed(1)
    top, left = torch.randint(2 * shift + 1, (2, n), generator=draw)
    mirror = torch.randint(2, (n,), generator=draw).bool()
    found = moves.augmented(IMAGES, shift, top, left, mirror)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                column = width - 1 - x if mirror[i] else x
                from_y, from_x = y + top[i] - shift, column + left[i] - shift
                inside = 0 <= from_y < height and 0 <= from_x < width
                expected = IMAGES[i, :, from_y, from_x] if inside else torch.zeros(2)
                assert torch.equal(found[i, :, y, x], expected.to(torch.uint8))


def mirrored(epoch, augment):
    """Return by image whether the image was mirrored in an epoch, for the images that took part."""
    whole = [torch.cat(parts) for parts in zip(*epoch_of(0, 1, epoch, augment=augment))]
    for image, label in zip(*whole):
        assert torch.equal(image, IMAGES[label]) or torch.equal(image.flip(2), IMAGES[label])
    return {int(label): not torch.equal(image, IMAGES[label]) for image, label in zip(*whole)}


def test_alternating_images_are_mirrored_in_every_second_epoch():
    """Oracle: the first two epochs; at random, half of the images would differ."""
    alternating = moves.Augmentation(shift=0, alternating=True)
    first, second, *later = (mirrored(epoch, alternating) for epoch in range(5))
    assert 10 < sum(first.values()) < 40
    for found in (second, *later):
        assert found.keys() != first.keys()  # another image is dropped
    assert all(second[image] is not first[image] for image in first.keys() & second.keys())
    for found, alike in zip(later, (first, second, first)):
        assert all(found[image] is alike[image] for image in found.keys() & alike.keys())
    by_chance = [mirrored(epoch, moves.Augmentation(shift=0)) for epoch in (0, 1)]
    both = by_chance[0].keys() & by_chance[1].keys()
    assert 10 < sum(by_chance[0][image] is by_chance[1][image] for image in both) < 40


def test_the_options_choose_the_augmentation():
    """Oracle: the options' help."""
    plain, usual = DataOptions(), DataOptions(augment=True)
    other = DataOptions(augment=True, shift=0, mirror="alternating")
    assert moves.Augmentation.of(plain) is None
    assert moves.Augmentation.of(usual) == moves.Augmentation(4, alternating=False)
    assert moves.Augmentation.of(other) == moves.Augmentation(0, alternating=True)


def test_normalised_images_have_mean_0_and_variance_1_per_channel():
    """Oracle: torch's mean and variance of the pixels in float64."""
    normalise = batches.Normalise(IMAGES, torch.device("cpu"))
    exact = IMAGES.double()
    mean = exact.mean((0, 2, 3), keepdim=True)
    deviation = exact.std((0, 2, 3), keepdim=True, correction=0)
    assert torch.allclose(normalise(IMAGES).double(), (exact - mean) / deviation, atol=1e-6)


def test_a_constant_channel_does_not_become_nan():
    blank = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    assert torch.equal(batches.Normalise(blank, torch.device("cpu"))(blank), blank.float())


@pytest.mark.parametrize("images", [0, 1, 2, 7, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_evaluation_takes_every_image_once_at_any_number_of_ranks(images, ranks):
    taken = []
    for rank in range(ranks):
        mine = batches.share(IMAGES[:images], LABELS[:images], rank, ranks)
        for part, labels in batches.parts(*mine, size=3):
            assert torch.equal(part, IMAGES[labels])
            taken += labels.tolist()
    assert taken == list(range(images))
