"""Rules that combine vectors of ranks, some of which are wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mpikfac.numerics import BY_COORDINATE, BY_VECTOR, combined
from mpikfac.plan import Robust

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
    if rule.combine in BY_COORDINATE:
        return BY_COORDINATE[rule.combine](given, rule).numpy()
    return combined(given, BY_VECTOR[rule.combine](given @ given.T, rule)).numpy()


def test_the_median_is_numpys(vectors):
    """Oracle: `numpy.median`, of an odd and of an even number."""
    for ranks in (6, 7):
        found = by(Robust("median"), vectors[:ranks])
        np.testing.assert_allclose(found, np.median(vectors[:ranks], axis=0), rtol=1e-14)


def test_the_trimmed_mean_leaves_out_both_ends(vectors):
    """Oracle: each coordinate by itself."""
    found = by(Robust("trimmed-mean", liars=2), vectors)
    expected = [np.mean(sorted(column)[2:-2]) for column in vectors.T]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_krum_takes_the_vector_nearest_to_its_neighbours(vectors):
    """Oracle: all sums of squared distances, by hand."""
    scores = []
    for own in vectors:
        distances = sorted(((own - other) ** 2).sum() for other in vectors)
        scores.append(sum(distances[1 : 1 + len(vectors) - WRONG - 2]))
    found = by(Robust("krum", liars=WRONG), vectors)
    assert np.array_equal(found, vectors[np.argmin(scores)])


def test_the_geometric_median_has_the_least_sum_of_distances(vectors):
    """Oracle: the gradient of the sum of distances is zero."""
    found = by(Robust("geometric-median"), vectors)
    directions = (found - vectors) / np.linalg.norm(found - vectors, axis=1, keepdims=True)
    assert np.abs(directions.sum(0)).max() < 1e-6


def test_the_geometric_median_of_equal_vectors_is_the_vector():
    """Oracle: the vector."""
    found = by(Robust("geometric-median"), np.ones((4, 3)))
    np.testing.assert_allclose(found, np.ones(3), rtol=1e-14)


@pytest.mark.parametrize("radius", [0.3, 1.0, 1e3])
def test_centred_clip_bounds_each_difference(vectors, radius):
    """Oracle: the formula in numpy; the first vector is the centre."""
    centre, others = vectors[0], vectors[1:]
    far = np.linalg.norm(others - centre, axis=1, keepdims=True)
    expected = centre + ((others - centre) * np.minimum(1, radius / far)).mean(0)
    found = by(Robust("centred-clip", clip_radius=radius), vectors)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


RULES = [
    Robust("median"),
    Robust("trimmed-mean", liars=WRONG),
    Robust("krum", liars=WRONG),
    Robust("geometric-median"),
    Robust("centred-clip", clip_radius=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.combine)
@pytest.mark.parametrize("wrong", [1e6, np.nan, np.inf])
def test_a_minority_does_little_harm(vectors, rule, wrong):
    """Oracle: the mean of the right ranks; the mean of all ranks is far off or NaN."""
    vectors[RIGHT:] = wrong
    right = vectors[:RIGHT].mean(0)
    with np.errstate(invalid="ignore"):
        assert not np.linalg.norm(vectors.mean(0) - right) < 100
    assert np.linalg.norm(by(rule, vectors) - right) < 1.0


@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: rule.combine)
def test_the_order_of_ranks_does_not_matter(vectors, rule):
    """Oracle: other orders."""
    expected = by(rule, vectors)
    for order in itertools.islice(itertools.permutations(range(len(vectors))), 0, 5000, 911):
        np.testing.assert_allclose(by(rule, vectors[list(order)]), expected, rtol=1e-9)


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="liars=2 needs at least 7 ranks, not 6"):
        Robust("krum", liars=2).check_ranks(6)
