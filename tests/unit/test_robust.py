"""Rules that combine the vectors of ranks, some of which are faulty."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from mpikfac.lab import CenteredClipping, GeometricMedian, Krum, Median, Safeguard, TrimmedMean
from mpikfac.lab.robust.config import NearMost
from mpikfac.lab.robust.rules import farthest
from mpikfac.lab.robust.shards import Near
from mpikfac.numerics import by_vector, combined
from support import byzantine

pytestmark = pytest.mark.lab

RIGHT, WRONG, SIZE = 5, 2, 40


@pytest.fixture
def vectors():
    """Return vectors of ranks: alike, but for the last two."""
    random = np.random.default_rng(0)
    right = 1 + 0.1 * random.normal(size=(RIGHT, SIZE))
    return np.concatenate([right, -30 * np.ones((WRONG, SIZE))])


def by(rule, vectors):
    """Return what a rule makes of vectors."""
    given = torch.tensor(vectors)
    if not rule.products(len(given)):
        return rule.combine(given).numpy()
    if isinstance(rule, Safeguard):
        return step_of(by_vector(rule, len(given), given[0]), vectors)
    return combined(given, rule.weights(given @ given.T)).numpy()


def step_of(rule, vectors):
    """Return what a rule with memory makes of the vectors of a step."""
    given = torch.tensor(vectors)
    rows = rule.rows(given)
    return rule.combine(rows @ rows.mT, given).numpy()


def test_the_median_is_numpys(vectors):
    """Oracle: `numpy.median`, of an odd and of an even number."""
    for ranks in (6, 7):
        found = by(Median(), vectors[:ranks])
        np.testing.assert_allclose(found, np.median(vectors[:ranks], axis=0), rtol=1e-14)


def test_the_trimmed_mean_leaves_out_both_ends(vectors):
    """Oracle: each coordinate by itself."""
    found = by(TrimmedMean(num_byzantine=2), vectors)
    expected = [np.mean(sorted(column)[2:-2]) for column in vectors.T]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_krum_takes_the_vector_nearest_to_its_neighbours(vectors):
    """Oracle: all sums of squared distances, by hand."""
    scores = []
    for own in vectors:
        distances = sorted(((own - other) ** 2).sum() for other in vectors)
        scores.append(sum(distances[1 : 1 + len(vectors) - WRONG - 2]))
    found = by(Krum(num_byzantine=WRONG), vectors)
    assert np.array_equal(found, vectors[np.argmin(scores)])


def test_the_geometric_median_has_the_least_sum_of_distances(vectors):
    """Oracle: the gradient of the sum of distances is zero."""
    found = by(GeometricMedian(), vectors)
    directions = (found - vectors) / np.linalg.norm(found - vectors, axis=1, keepdims=True)
    assert np.abs(directions.sum(0)).max() < 1e-6


def test_the_geometric_median_of_equal_vectors_is_the_vector():
    """Oracle: the vector."""
    found = by(GeometricMedian(), np.ones((4, 3)))
    np.testing.assert_allclose(found, np.ones(3), rtol=1e-14)


@pytest.mark.parametrize("radius", [0.3, 1.0, 1e3])
def test_centered_clipping_bounds_each_difference(vectors, radius):
    """Oracle: the formula in numpy; the first vector is the centre."""
    centre, others = vectors[0], vectors[1:]
    far = np.linalg.norm(others - centre, axis=1, keepdims=True)
    expected = centre + ((others - centre) * np.minimum(1, radius / far)).mean(0)
    found = by(CenteredClipping(radius=radius), vectors)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


RULES = [
    Median(),
    TrimmedMean(num_byzantine=WRONG),
    Krum(num_byzantine=WRONG),
    GeometricMedian(),
    Safeguard(),
    CenteredClipping(radius=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("wrong", [1e6, np.nan, np.inf])
def test_a_minority_does_little_harm(vectors, rule, wrong):
    """Oracle: the mean of the right ranks; the mean of all ranks is far off or NaN."""
    vectors[RIGHT:] = wrong
    right = vectors[:RIGHT].mean(0)
    with np.errstate(invalid="ignore"):
        assert not np.linalg.norm(vectors.mean(0) - right) < 100
    assert np.linalg.norm(by(rule, vectors) - right) < 1.0


@pytest.mark.parametrize("rule", RULES[:5], ids=lambda rule: rule.name)
def test_the_order_of_ranks_does_not_matter(vectors, rule):
    """Oracle: other orders."""
    expected = by(rule, vectors)
    for order in itertools.islice(itertools.permutations(range(len(vectors))), 0, 5000, 911):
        np.testing.assert_allclose(by(rule, vectors[list(order)]), expected, rtol=1e-9)


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="num_byzantine=2 needs at least 7 ranks, not 6"):
        Krum(num_byzantine=2).check_ranks(6)


WINDOWS = Safeguard(long_window=6, short_window=2, threshold=1.2)


def safeguarded(rule, steps):
    """Yield the means of steps and the good ranks, by the rule in numpy [Allen-Zhu et al. 2021]."""
    ranks, windows, spread = len(steps[0]), (rule.long_window, rule.short_window), 0.0
    good, sums = np.ones(ranks, bool), np.zeros((2, *steps[0].shape))
    for step, vectors in enumerate(steps):
        for window, of_window in zip(windows, sums):
            if step % window == 0:
                of_window[:] = 0
        if rule.reset_interval and step % rule.reset_interval == 0:
            good, sums = np.ones(ranks, bool), 0 * sums
        sums += vectors / good.sum()
        far, reach, median = reaches(vectors, good)
        usual = sorted(reach.values())[(len(reach) - 1) // 2]
        longest = min(far[median, good].max(), rule.threshold * usual) / good.sum()
        spread += (longest**2 - spread) / min(step + 1, rule.long_window)
        near = good.copy()
        for window, of_window in zip(windows, sums):
            far, reach, median = reaches(of_window, good)
            least = rule.floor * np.sqrt(window * spread)
            near &= far[median] <= max(rule.threshold * reach[median], least)
        before, good = good, good & near
        yield vectors[before if rule.mean_of == "before" else good].mean(0), good


def reaches(vectors, good):
    """Return distances, the least distance of each good rank to most ranks, the median rank."""
    far = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    reach = {i: sorted(far[i, good])[len(vectors) // 2] for i in np.flatnonzero(good)}
    return far, reach, min(reach, key=reach.get)


def small_lies(steps, size=SIZE):
    """Return vectors of seven ranks, two of which move a little, always the same way."""
    random = np.random.default_rng(1)
    right = 1 + random.normal(size=(steps, RIGHT, size))
    lies = np.broadcast_to(right.mean(1, keepdims=True) - 0.8, (steps, WRONG, size))
    return np.concatenate([right, lies], axis=1)


@pytest.mark.parametrize(
    ("size", "choices"),
    [
        (SIZE, {"floor": 0.0}),
        (10, {"floor": 0.0, "threshold": 2.0}),  # else other ranks if sums never begin anew
        (SIZE, {"floor": 0.0, "mean_of": "before"}),
        (SIZE, {"floor": 0.9}),
        (SIZE, {"floor": 1.2, "reset_interval": 5}),
        (SIZE, {"floor": 0.0, "reset_interval": 7, "mean_of": "before"}),
    ],
)
def test_the_safeguard_is_the_rule_of_two_windows(size, choices):
    """Oracle: the rule in numpy, step by step, over several windows."""
    steps, windows = small_lies(30, size), replace(WINDOWS, **choices)
    rule = by_vector(windows, RIGHT + WRONG, torch.zeros(size).double())
    dropped = []
    for (mean, good), vectors in zip(safeguarded(windows, steps), steps):
        np.testing.assert_allclose(step_of(rule, vectors), mean, rtol=1e-12)
        assert np.array_equal(rule.good.numpy(), good)
        dropped.append((~good).sum())
    assert any(dropped)
    assert (np.diff(dropped) < 0).any() == (windows.reset_interval > 0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_ranks_add_up_as_many_inner_products_as_planned(vectors, rule):
    """Oracle: the plan's number."""
    if rule.products(len(vectors)):
        given = torch.tensor(vectors)
        products = by_vector(rule, len(given), given[0]).products(given)
        assert products.numel() == rule.products(len(given))


@pytest.mark.parametrize("floor", [0.0, 3.0])
def test_the_floor_keeps_right_ranks_whose_noise_has_few_directions(floor):
    """Oracle: no rank lies; without the floor, each seed drops right ranks."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        basis = random.normal(size=(3, SIZE))
        rule = by_vector(Safeguard(floor=floor), RIGHT, torch.zeros(SIZE).double())
        for _ in range(200):
            step_of(rule, 1 + random.normal(size=(RIGHT, 3)) @ basis)
        assert rule.good.all() == (floor > 0)


@pytest.mark.parametrize("wrong", [10.0, 1e9, np.nan])
def test_wrong_ranks_do_not_raise_the_floor(wrong):
    """Oracle: the farthest right ranks; half of the ranks reach most ranks among right ranks."""
    random = np.random.default_rng(0)
    vectors = 1 + 0.1 * random.normal(size=(RIGHT + WRONG, SIZE))
    vectors[RIGHT:] *= wrong
    given = torch.tensor(vectors)
    found = farthest(given @ given.T, torch.ones(RIGHT + WRONG).bool(), 2.0)
    right = vectors[:RIGHT]
    assert 0 < found <= 2 * np.linalg.norm(right[:, None] - right, axis=-1).max()


def test_the_safeguard_sees_lies_that_are_small_in_each_step():
    """Oracle: the Byzantine ranks; Krum, which looks at one step, takes a liar's vector."""
    rule = by_vector(Safeguard(), RIGHT + WRONG, torch.zeros(400).double())
    steps = small_lies(60, 400)
    assert by(Krum(num_byzantine=WRONG), steps[0])[0] == steps[0, -1, 0]
    for vectors in steps:
        step_of(rule, vectors)
    assert rule.good.tolist() == [True] * RIGHT + [False] * WRONG


@pytest.mark.parametrize("of", ["before", "after"])
def test_a_vector_that_is_not_finite_never_counts(of):
    """Oracle: the mean of the other ranks, also where the rank was good before."""
    rule = by_vector(replace(WINDOWS, mean_of=of), RIGHT, torch.zeros(SIZE).double())
    vectors = np.ones((RIGHT, SIZE))
    vectors[0] = np.nan
    assert np.array_equal(step_of(rule, vectors), np.ones(SIZE))


def test_a_dropped_rank_never_counts_again():
    """Oracle: the mean of the other ranks; the vectors are NaN in the first step only."""
    rule = by_vector(WINDOWS, RIGHT, torch.zeros(SIZE).double())
    for step in range(8):
        vectors = np.ones((RIGHT, SIZE))
        vectors[0] = np.nan if step == 0 else 2.0
        assert np.array_equal(step_of(rule, vectors), np.ones(SIZE))


def test_steps_without_a_finite_vector_leave_no_trace():
    """Oracle: the mean of the next step."""
    rule = by_vector(WINDOWS, RIGHT, torch.zeros(SIZE).double())
    assert np.isnan(step_of(rule, np.full((RIGHT, SIZE), np.nan))).all()
    assert np.array_equal(step_of(rule, np.ones((RIGHT, SIZE))), np.ones(SIZE))


def test_noise_has_the_asked_deviation_and_is_drawn_anew_at_each_step():
    """Oracle: the deviation of many numbers."""
    rule = by_vector(Safeguard(noise_std=0.1), 3, torch.zeros(10_000).double(), 16)
    first, second = (step_of(rule, np.ones((3, 10_000))) - 1 for _ in range(2))
    assert abs(first.std() - 0.1) < 0.005
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


@pytest.mark.parametrize("attack", byzantine.OF_GRADIENTS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_attacks_do_not_turn_the_step_around(vectors, rule, attack):
    """Oracle: the mean of the right ranks, along which a step must go."""
    right = torch.tensor(vectors[:RIGHT])
    attacked = np.concatenate([right, byzantine.OF_GRADIENTS[attack](right, WRONG)])
    assert by(rule, attacked) @ vectors[:RIGHT].mean(0) > 0


def test_the_attacks_are_those_of_the_papers():
    """Oracle: by hand; 0.43 is where two thirds of a normal distribution end."""
    right = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    found = {name: attack(right, 2)[0].tolist() for name, attack in byzantine.OF_GRADIENTS.items()}
    assert found["sign flip"] == [-2.0, 0.0]
    assert found["inner product"] == [-1.0, 0.0]
    assert found["a little is enough"] == pytest.approx([2 - 0.4307, 0.0], abs=1e-4)
    assert byzantine.flipped(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    own = [torch.tensor([float(step)]) for step in range(byzantine.DELAY + 3)]
    assert [byzantine.delayed(own[:steps]).item() for steps in (1, len(own))] == [0.0, 2.0]
    assert byzantine.rescaled(own[:11]).item() == -6.0


# -- factors --------------------------------------------------------------------------------------

BLOCKS = ((0, 6, 8), (16, 30, 32))  # first and last element, and the place of the count
PLACES = 40


def in_shards(vectors, edges):
    """Return the sums that ranks with shards between the edges make of blocks."""
    shards = [
        (Near(NearMost(BLOCKS, 2.0), start), torch.tensor(vectors[:, start:stop]))
        for start, stop in itertools.pairwise(edges)
    ]
    products = sum(near.products(parts) for near, parts in shards)
    return torch.cat([near.combine(products, parts) for near, parts in shards]).numpy()


def sums_of_ranks(counts):
    """Return sums `[ranks, PLACES]` over examples: means of all ranks are alike."""
    random = np.random.default_rng(3)
    sums = np.zeros((len(counts), PLACES))
    for start, stop, count in BLOCKS:
        means = 1 + 0.1 * random.normal(size=(len(counts), stop - start))
        sums[:, start:stop], sums[:, count] = means * counts[:, None], counts
    return sums


@pytest.mark.parametrize("edges", [(0, PLACES), (0, 4, 8, 20, 40), (0, 0, 17, 40, 40)])
def test_each_factor_comes_from_ranks_whose_means_are_near(edges):
    """Oracle: sums of the right ranks, block by block; counts of right ranks differ."""
    sums = sums_of_ranks(np.array([8.0, 8.0, 7.0, 9.0, 8.0]))
    expected = sums.sum(0)
    sums[3, 16:30] *= -5.0  # wrong in one block only
    expected[16:33] = sums[[0, 1, 2, 4], 16:33].sum(0)
    np.testing.assert_allclose(in_shards(sums, edges), expected, rtol=1e-14)


@pytest.mark.parametrize("wrong", ["NaN", "many examples", "no examples"])
def test_factors_of_a_rank_without_usable_numbers_do_not_count(wrong):
    """Oracle: sums of all ranks but the first."""
    sums = sums_of_ranks(np.full(4, 8.0))
    if wrong == "NaN":
        sums[0, :6] = np.nan
    elif wrong == "many examples":
        sums[0, :9] *= 1000.0
    else:
        sums[0, :9] = 0.0
    found = in_shards(sums, (0, 10, PLACES))
    np.testing.assert_allclose(found[:9], sums[1:, :9].sum(0), rtol=1e-14)
    np.testing.assert_allclose(found[16:], sums[:, 16:].sum(0), rtol=1e-14)


def test_a_layer_that_few_ranks_use_keeps_the_examples():
    """Oracle: the sums of the two ranks with examples, of five."""
    sums = sums_of_ranks(np.array([0.0, 0.0, 0.0, 8.0, 8.0]))
    np.testing.assert_allclose(in_shards(sums, (0, PLACES)), sums.sum(0), rtol=1e-14)
    assert not in_shards(np.zeros((5, PLACES)), (0, PLACES)).any()
