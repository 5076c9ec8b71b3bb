"""Mixup and cutmix: pixels and labels by hand, the same batches on all ranks, and whole runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.problems.tasks import CLASSIFICATION
from mpikfac_apps.training import batches, train
from mpikfac_apps.training.augmentation import mixes
from mpikfac_apps.training.augmentation.mixes import Mixes

BOTH = Mixes(mixup=0.4, cutmix=1.0, classes=5, seed=0)
IMAGES = torch.randint(
    256, (24, 3, 8, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
LABELS = torch.arange(24) % 5
DRAW = np.random.default_rng


def flat(*values):
    """Return images of 4x4 pixels, each of a single value."""
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 4, 4)


def test_mixup_takes_weighted_means_of_pairs():
    """Oracle: by hand: 0.25 x 100 + 0.75 x 200 = 175, and the reverse."""
    mixed, share = mixes.mixed_up(flat(100, 200, 3, 0), 0.25, DRAW(0))
    assert share == 0.25
    assert torch.equal(mixed[:, 0, 0, 0], torch.tensor([175.0, 125.0, 0.75, 2.25]))


def test_means_of_bytes_are_exact():
    """Oracle: float64, for all pairs of bytes and a weight without a short binary form."""
    first, second = torch.cartesian_prod(torch.arange(256), torch.arange(256)).unbind(1)
    images = torch.stack([first, second], 1).flatten().to(torch.uint8).view(-1, 1, 1, 1)
    mixed, share = mixes.mixed_up(images, 1 / 3, DRAW(0))
    assert share == pytest.approx(1 / 3, abs=1e-5)
    expected = share * first.double() + (1 - share) * second.double()
    assert torch.equal(mixed[::2].flatten().double(), expected)


@pytest.mark.parametrize("seed", range(8))
def test_cutmix_shows_a_box_of_the_partner(seed):
    """Oracle: the pixels, counted; the box that the same numbers draw."""
    mixed, share = mixes.cut_and_mixed(flat(100, 200), 0.5, DRAW(seed))
    left, top, right, bottom = mixes.drawn_box(4, 4, 0.5, DRAW(seed))
    own = torch.ones(4, 4, dtype=torch.bool)
    own[top:bottom, left:right] = False
    assert torch.equal(mixed[0, 0] == 100, own) and torch.equal(mixed[0, 0] == 200, ~own)
    assert torch.equal(mixed[1, 0] == 200, own) and torch.equal(mixed[1, 0] == 100, ~own)
    assert share == own.double().mean().item()


def test_boxes_have_the_share_of_the_area_or_are_cut_off():
    """Oracle: by hand: a quarter of 8x8 pixels is a box of 4x4 around any pixel."""
    boxes = {mixes.drawn_box(8, 8, 0.75, DRAW(seed)) for seed in range(2000)}
    middles = [(x, y) for x in range(8) for y in range(8)]
    assert boxes == {
        (max(0, x - 2), max(0, y - 2), min(8, x + 2), min(8, y + 2)) for x, y in middles
    }
    left, top, right, bottom = mixes.drawn_box(8, 8, 1.0, DRAW(0))
    assert (right - left) * (bottom - top) == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loss_is_the_weighted_mean_of_both_labels(share, smoothing):
    """Oracle: the losses of both labels by torch, with the gradients of both."""
    scores = torch.randn(24, 5, dtype=torch.float64, requires_grad=True)
    other = LABELS.view(-1, 2).flip(1).flatten()
    own, theirs = (F.cross_entropy(scores, y, label_smoothing=smoothing) for y in (LABELS, other))
    expected = share * own + (1 - share) * theirs
    rows = mixes.shares(LABELS, 5, share)
    assert torch.allclose(rows.sum(1), torch.ones(24))
    found = F.cross_entropy(scores, rows.double(), label_smoothing=smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found, scores)
    torch.testing.assert_close(
        gradient, *torch.autograd.grad(expected, scores), rtol=1e-5, atol=1e-9
    )


def test_a_mixed_image_counts_as_much_as_its_share_of_the_best_class():
    """Oracle: by hand: scores choose class 0, 0, 1."""
    scores = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    rows = torch.tensor([[0.7, 0.3], [0.3, 0.7], [0.0, 1.0]])
    assert CLASSIFICATION.measured(scores, rows).item() == pytest.approx(2.0)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_shares_of_ranks_are_the_mixed_batch_in_order(ranks):
    """Oracle: a single rank."""
    for index in range(6):  # both kinds of mixes
        images, rows = BOTH(2, index, IMAGES, LABELS)
        parts = zip(IMAGES.chunk(ranks), LABELS.chunk(ranks))
        found = [BOTH(2, index, *part) for part in parts]
        assert torch.equal(torch.cat([part for part, _ in found]), images)
        assert torch.equal(torch.cat([part for _, part in found]), rows)


def test_numbers_follow_from_seed_epoch_and_index():
    """Oracle: equal calls are equal, and other numbers give other batches."""

    def drawn(seed=0, epoch=0, index=0, **kinds):
        chosen = {"mixup": 1.0, "cutmix": None} | kinds
        return Mixes(**chosen, classes=5, seed=seed)(epoch, index, IMAGES, LABELS)

    assert all(map(torch.equal, drawn(), drawn()))
    others = [drawn(seed=1), drawn(epoch=1), drawn(index=1), drawn(mixup=None, cutmix=1.0)]
    assert not any(torch.equal(drawn()[1], rows) for _, rows in others)


def test_both_kinds_of_mixes_take_turns_at_random_with_shares_of_the_distribution():
    """Oracle: Beta(alpha, alpha) has mean 1/2 and variance 1/(4 (2 alpha + 1))."""
    only = Mixes(mixup=0.4, cutmix=None, classes=5, seed=3)
    pair = torch.tensor([0, 1])
    shares = np.array([only(0, i, IMAGES[:2], pair)[1][0, 0].item() for i in range(2000)])
    assert abs(shares.mean() - 0.5) < 0.03 and abs(shares.var() - 1 / 7.2) < 0.01
    kinds = [BOTH(0, i, IMAGES[:2], pair)[0].is_floating_point() for i in range(200)]
    assert 70 < sum(kinds) < 130


def test_the_options_choose_the_mixes():
    """Oracle: the options' help."""
    assert Mixes.of(DataOptions(), 5, 0) is None
    assert Mixes.of(DataOptions(mixup=0.4, cutmix=1.0), 5, 0) == BOTH


def test_mixed_images_are_normalised_and_stay_as_they_are():
    """Oracle: the mean of the normalised images of a pair."""
    normalise = batches.Normalise(IMAGES, torch.device("cpu"))
    mixed, share = mixes.mixed_up(IMAGES, 0.3, DRAW(0))
    before = mixed.clone()
    own = normalise(IMAGES)
    expected = share * own + (1 - share) * mixes.partners(own)
    torch.testing.assert_close(normalise(mixed), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed, before)


# -- runs ------------------------------------------------------------------------------------------

STEPS = 6
QUICK = (
    *("--data.train_images=72", "--batch=24", "--epochs=2", "--threads=1", "--log_every=1"),
    *("--data.mixup=0.4", "--data.cutmix=1", "--lr=0.003", "--label_smoothing=0.1"),
)
KINDS = {
    "kfac": ("--transport.virtual_ranks=4",),
    "mc": ("--transport.virtual_ranks=4", "--kfac.fisher_type=mc"),
    "adapted": ("--transport.virtual_ranks=4", "--kfac.grafting=none", "--kfac.damping_adapt=2"),
    "sgd": ("--transport.virtual_ranks=4", "--optimizer=sgd"),
}
QUADRATIC = (
    *("--kfac.grafting=quadratic-model", "--schedule=constant", "--momentum=0", "--weight_decay=0"),
    *("--lr=1", "--kfac.fisher_type=type-2", "--kfac.damping=0.02"),
)


def runs(root):
    for name, more in KINDS.items():
        for ranks, kind, extra in (
            (1, "1", ()),
            (2, "2", ()),
            (2, "parted", ("--max_steps=4",)),
            (1, "parted", ("--resume=auto",)),
        ):
            yield ranks, [*QUICK, *more, *extra, f"--run_dir={root / f'{name} {kind}'}"]
    for ranks in (1, 2):
        run_dir = f"--run_dir={root / f'quadratic {ranks}'}"
        yield ranks, [*QUICK, *QUADRATIC, "--model=plain", run_dir]


def weights(run_dir, steps=STEPS):
    saved = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{steps:09d}")
    return {name: saved[name] for name in saved if name.startswith("model/")}


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2", "parted"])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_and_restarts_change_no_bit(job, name, kind):
    """Oracle: an uninterrupted run on one rank."""
    expected, found = weights(job / f"{name} 1"), weights(job / f"{name} {kind}")
    assert expected
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
def test_a_quadratic_model_takes_mixed_images_on_all_ranks_alike(job):
    """Oracle: one rank, to rounding."""
    one, two = ([r["loss"] for r in rows(job / f"quadratic {n}") if "loss" in r] for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-3)


def test_the_loss_of_a_run_is_of_mixed_images_and_the_test_takes_plain_images(tmp_path):
    """Oracle: the first loss by hand: losses of both labels on mixed pixels, at first weights."""
    chosen = ("--optimizer=sgd", "--lr=0.001", "--batch=72", "--epochs=1", "--data.mixup=1")
    start = ("--data.train_images=72", "--threads=1", "--log_every=1", "--max_steps=1")
    assert train.main([*chosen, *start, f"--run_dir={tmp_path}"]) == 0
    torch.manual_seed(0)
    model = models.channels_last(models.build("digits_cnn", classes=10, channels=1))
    found = datasets.load("digits", train_images=72)
    normalise = batches.Normalise(found.train_images, torch.device("cpu"))
    whole = batches.Batches(found.train_images, found.train_labels, 72, seed=0, augment=None)
    images, labels = whole.get(0, 0)
    _, own = Mixes(1.0, None, 10, 0)(0, 0, images, labels)
    share = own[0, labels[0]].item()
    pairs = images.view(-1, 2, *images.shape[1:]).double()
    pixels = share * pairs + (1 - share) * pairs.flip(1)
    scores = model(normalise(pixels.flatten(0, 1).float()))
    other = labels.view(-1, 2).flip(1).flatten()
    expected = share * F.cross_entropy(scores, labels) + (1 - share) * F.cross_entropy(
        scores, other
    )
    step, epoch = rows(tmp_path)
    assert labels[0] != other[0] and 0 < share < 1
    assert step["loss"] == pytest.approx(expected.item(), rel=1e-5)
    saved = weights(tmp_path, steps=1)
    model.load_state_dict({name: saved[f"model/{name}"] for name in model.state_dict()})
    model.eval()
    tested = F.cross_entropy(model(normalise(found.test_images)), found.test_labels)
    assert epoch["test_loss"] == pytest.approx(tested.item(), rel=1e-5)
