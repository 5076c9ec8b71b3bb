"""Combine shards of all ranks' vectors with rules that have a state, or that work on blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mpikfac.lab.robust.config import NearMost
from mpikfac.lab.robust.rules import farthest, near_most
from mpikfac.numerics import ByVector

SPREAD = 2_654_435_761  # a prime, so that seeds of neighbouring steps and shards differ


class Centred(ByVector):
    """Combine shards with a rule whose first vector is the previous step's result."""

    def _empty(self, ranks: int, like: Tensor) -> dict[str, Tensor]:
        return {"centre": torch.zeros_like(like)}

    def rows(self, parts: Tensor) -> Tensor:
        """Return the centre, followed by the shards of all ranks."""
        return torch.cat([self.memory["centre"][None], parts])

    def combine(self, products: Tensor, parts: Tensor) -> Tensor:
        """Return the result's shard, and store it as the next centre."""
        shard = super().combine(products, self.rows(parts))
        self.memory["centre"].copy_(shard)
        return shard


class Windows(ByVector):
    """Average the ranks whose vectors, summed over two windows, stay near those of most ranks.

    Other ranks are dropped; with `reset_interval`, they are included again after that many steps
    [Allen-Zhu et al. 2021].
    """

    def _empty(self, ranks: int, like: Tensor) -> dict[str, Tensor]:
        return {
            "spread": like.new_zeros(1, dtype=torch.float64),
            "sums": like.new_zeros(2, ranks, len(like)),
            "dropped": like.new_zeros(ranks, dtype=torch.int64),
            "steps": like.new_zeros(1, dtype=torch.int64),
        }

    @property
    def good(self) -> Tensor:
        """A mask `[ranks]` of the ranks that are not dropped."""
        return self.memory["dropped"] == 0

    def rows(self, parts: Tensor) -> Tensor:
        """Add good ranks' vectors to both sums; return the sums and vectors, `[3, ranks, n]`."""
        steps, sums = int(self.memory["steps"]), self.memory["sums"]
        for window, of_window in zip(self.rule.windows, sums):
            if steps % window == 0:
                of_window.zero_()
        if self.rule.reset_interval and steps % self.rule.reset_interval == 0:
            self.memory["dropped"].zero_()
            sums.zero_()
        good = self.good
        sums[:, good] += parts[good] / good.sum()
        return torch.cat([sums, parts[None]])

    def combine(self, products: Tensor, parts: Tensor) -> Tensor:
        """Drop ranks with distant sums; return the mean of the good ranks, plus noise."""
        *of_windows, of_step = products
        before = good = self.good
        spread = self._spread(of_step)
        for window, of_window in zip(self.rule.windows, of_windows):
            least = self.rule.floor * (window * spread).sqrt()
            good = good & near_most(of_window, before, self.rule.threshold, least)
        if not good.any():  # no vector is finite
            self.reset()
            return parts.mean(0)
        self.memory["dropped"].copy_(~good)
        self.memory["sums"][:, ~good] = 0
        averaged = good
        if self.rule.mean_of == "before":
            averaged = before & of_step.diagonal().isfinite()
        mean = parts[averaged].mean(0)
        if self.rule.noise_std:
            mean += self.rule.noise_std * self._noise(mean)
        self.memory["steps"] += 1
        return mean

    def _spread(self, of_step: Tensor) -> Tensor:
        """Return the mean square of the longest distance of a good rank from the median rank.

        The distance is the one that `farthest` returns. The result is a running mean over the steps
        of the long window. Vectors are divided by the number of good ranks, as in the sums.
        """
        spread, good = self.memory["spread"], self.good
        steps = min(int(self.memory["steps"]) + 1, self.rule.long_window)
        longest = (farthest(of_step, good, self.rule.threshold) / good.sum()).square()
        return spread.lerp_(longest.where(longest.isfinite(), spread[0]), 1 / steps)[0]

    def _noise(self, like: Tensor) -> Tensor:
        """Return random normal values that depend only on the step and the shard."""
        generator = torch.Generator(like.device)
        generator.manual_seed((int(self.memory["steps"]) * SPREAD + self.first) % 2**32)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


class Near:
    """Sum each block of factors over the ranks whose blocks are near most ranks' blocks.

    A block is a sum over local examples, but distances are measured between means. Ranks without
    examples, and ranks with many more examples than most, are never near.
    """

    def __init__(self, rule: NearMost, first: int) -> None:
        """Store the rule and the shard's position.

        Args:
            first: the shard's offset in a vector.
        """
        self.rule, self.first = rule, first

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Yield the positions of each block and of its count in the shard."""
        for start, stop, count in self.rule.blocks:
            yield (
                slice(max(0, start - self.first), max(0, stop - self.first)),
                slice(max(0, count - self.first), max(0, count + 1 - self.first)),
            )

    def products(self, parts: Tensor) -> Tensor:
        """Return the inner products of blocks and counts, `[blocks, 2, ranks, ranks]` in float64.

        Args:
            parts: the shards of all ranks' vectors, `[ranks, n]`.
        """
        wide = parts.double()
        products = [wide[:, place] @ wide[:, place].mT for pair in self._places() for place in pair]
        return torch.stack(products).unflatten(0, (-1, 2))

    def combine(self, products: Tensor, parts: Tensor) -> Tensor:
        """Return the shard `[n]` of the sums; see `ByVector.combine`."""
        total = torch.zeros_like(parts[0])
        for (of_block, of_counts), pair in zip(products, self._places()):
            counts = of_counts.diagonal().sqrt()
            median = counts.where(counts > 0, torch.nan).nanmedian()
            usual = counts <= self.rule.factor * median
            near = near_most(of_block / of_counts, usual, self.rule.factor)
            for place in pair:
                total[place] = parts[near, place].sum(0)
        return total
