"""Rules that combine the vectors of all ranks so that a few faulty ranks do little harm.

A rule works on each coordinate separately, or computes a weight for each rank. The weights depend
only on the inner products of the vectors, `[ranks, ranks]`, so ranks that hold shards of all
vectors only need to sum their inner products.

Vectors with NaN or infinity get weight 0; in coordinate-wise rules, NaN counts as the largest
value.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 100  # the maximum number of iterations of Weiszfeld's method
PRECISION = 1e-12  # the iterations stop when every weight changes by less than this
ROUNDING = 1e-6  # the error of distances, relative to the longest vector


# -- by coordinate -------------------------------------------------------------------------------


def median(vectors: Tensor) -> Tensor:
    """Return each coordinate's median; of an even number of values, the mean of the middle two."""
    middle = (len(vectors) - 1) // 2
    return vectors.sort(0).values[middle : len(vectors) - middle].mean(0)


def trimmed_mean(vectors: Tensor, num_byzantine: int) -> Tensor:
    """Return each coordinate's mean without its `num_byzantine` smallest and largest values."""
    return vectors.sort(0).values[num_byzantine : len(vectors) - num_byzantine].mean(0)


# -- by vector -----------------------------------------------------------------------------------


def krum(products: Tensor, num_byzantine: int) -> Tensor:
    """Return a weight of 1 for the vector closest to its neighbours [Blanchard et al. 2017].

    The neighbours of a vector are all others except the `num_byzantine + 1` farthest ones.
    """
    ranks = len(products)
    nearest = _distances(products).sort(1).values[:, 1 : ranks - num_byzantine - 1]
    return products.new_zeros(ranks).index_fill(0, nearest.sum(1).argmin(), 1.0)


def geometric_median(products: Tensor) -> Tensor:
    """Return the weights of the point with the smallest sum of distances (Weiszfeld's method)."""
    usable = products.diagonal().isfinite()
    products = products.where(usable & usable[:, None], 0.0)
    weights = usable.double() / usable.sum()
    least = PRECISION * products.diagonal().amax().sqrt()
    for _step in range(STEPS):
        nearer = usable / _distances_from(products, weights).sqrt().clamp(min=least)
        before, weights = weights, nearer / nearer.sum()
        if (weights - before).abs().max() < PRECISION:
            break
    return weights


def centered_clipping(products: Tensor, radius: float) -> Tensor:
    """Return the weights of `centre + mean(clip(vector - centre))` [Karimireddy et al. 2021].

    The first vector is the centre, which is the previous step's result.
    """
    usable = products.diagonal().isfinite()
    products = products.where(usable & usable[:, None], 0.0)
    centre = products.new_zeros(len(products))
    centre[0] = 1.0
    far = _distances_from(products, centre).sqrt()
    shares = usable * (radius / far.clamp(min=1e-300)).clamp(max=1.0)
    shares[0] = 0.0
    shares /= len(products) - 1
    return shares + (1 - shares.sum()) * centre


def near_most(
    products: Tensor, ranks: Tensor, factor: float, least: float | Tensor = 0.0
) -> Tensor:
    """Return a mask `[ranks]` of the `ranks` that are near most ranks [Allen-Zhu et al. 2021].

    For each rank, consider the distance within which more than half of all ranks lie, including
    itself; the median rank is the one for which this distance is shortest. A rank is near if its
    distance from the median rank is at most `factor` times this shortest distance.

    Args:
        ranks: a mask `[ranks]` of the ranks to consider; ranks whose vectors contain NaN or
            infinity are never near. If at most half of all ranks remain, all of these are near.
        least: a distance within which ranks are always near.
    """
    ranks = ranks & products.diagonal().isfinite()
    distances = _distances_among(products, ranks)
    reach = _reach(distances)
    median = reach.argmin()
    rounding = ROUNDING * products.diagonal().where(ranks, 0.0).amax().sqrt()
    near = torch.maximum(factor * reach[median], rounding).clamp(min=least)
    return ranks & (distances[median] <= near)


def farthest(products: Tensor, ranks: Tensor, factor: float) -> Tensor:
    """Return the longest distance of `ranks` from the median rank that `near_most` defines.

    The result is NaN if at most half of all ranks remain. Otherwise, it is at most `factor` times
    the median, over ranks, of the distance within which more than half of all ranks lie. A few
    faulty ranks therefore cannot make it much longer than the distances between correct ranks.

    Args:
        ranks: see `near_most`.
    """
    distances = _distances_among(products, ranks & products.diagonal().isfinite())
    reach = _reach(distances)
    longest = distances[reach.argmin()]
    longest = longest.where(longest.isfinite(), 0.0).amax()
    usual = reach.where(reach.isfinite(), torch.nan).nanmedian()
    return torch.minimum(longest, factor * usual)


def _distances_among(products: Tensor, ranks: Tensor) -> Tensor:
    """Return distances `[ranks, ranks]`, which are infinite for all ranks outside the mask."""
    among = ranks & ranks[:, None]
    return _distances(products.where(among, 0.0)).sqrt().where(among, torch.inf)


def _reach(distances: Tensor) -> Tensor:
    """Return, for each rank, the distance within which more than half of all ranks lie."""
    return distances.sort(1).values[:, len(distances) // 2]


def _distances(products: Tensor) -> Tensor:
    """Return squared distances `[ranks, ranks]`; they are infinite for vectors with NaN."""
    squares = products.diagonal()
    distances = (squares + squares[:, None] - 2 * products).clamp_(min=0)
    return distances.where(distances.isfinite(), torch.inf).fill_diagonal_(0)


def _distances_from(products: Tensor, weights: Tensor) -> Tensor:
    """Return the squared distances of all vectors from their weighted sum."""
    along = products @ weights
    return (products.diagonal() - 2 * along + weights @ along).clamp_(min=0)
