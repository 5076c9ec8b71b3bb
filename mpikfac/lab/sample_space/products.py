"""Compute products with the residuals' Jacobian from its recorded rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from mpikfac.lab.sample_space.records import Block, Rows

CHUNK = 128
"""The number of rows multiplied at a time, so that products of their streams fit into a cache."""
ELEMENTWISE = 32
"""The time of an elementwise multiply-add, relative to a multiply-add in a matrix product."""


def chunks(rows: Rows) -> Iterator[Rows]:
    """Yield parts of at most `CHUNK` rows each; without rows, yield a single empty part."""
    for start in range(0, max(1, len(rows[0].a)), CHUNK):
        yield [block.part(slice(start, start + CHUNK)) for block in rows]


def gram(left: Sequence[Rows], right: Sequence[Rows]) -> Tensor:
    """Return the inner products of rows, `[left, right]`.

    If `left` and `right` are the same sequence, products below the diagonal are copied.
    """
    counts = [[len(rows[0].a) for rows in side] for side in (left, right)]
    total = left[0][0].a.new_zeros(sum(counts[0]), sum(counts[1]))
    lines = [line.split(counts[1], 1) for line in total.split(counts[0])]
    for i, rows in enumerate(left):
        for j, others in enumerate(right):
            if left is right and j < i:
                lines[i][j].copy_(lines[j][i].T)
            else:
                for block, other in zip(rows, others):
                    _inner(block, other, lines[i][j])
    return total


def _inner(left: Block, right: Block, total: Tensor) -> None:
    """Add the inner products of two blocks' rows to `total`, in the cheaper of two ways.

    `(sum g a^T) . (sum h b^T)` is the sum of `(a . b) (g . h)` over pairs of streams
    [Novak et al. 2022]. With many streams in a small layer, the rows themselves are multiplied.
    """
    (inputs, outputs), pairs = (left.a.shape[2], left.g.shape[2]), left.streams * right.streams
    if pairs * (inputs + outputs + ELEMENTWISE) > inputs * outputs:
        total.addmm_(left.matrix, right.matrix.T)
        return
    for a, g in left.of_streams:
        for b, h in right.of_streams:
            total.addcmul_(a @ b.T, g @ h.T)


def along(rows: Rows, matrices: Sequence[Tensor]) -> Tensor:
    """Return `J v`, `[rows]`, the products of rows with a vector that is given as matrices."""
    total = rows[0].a.new_zeros(len(rows[0].a))
    for block, matrix in zip(rows, matrices):
        total += ((block.a @ matrix.T) * block.g).sum((1, 2))
    return total


def combine(rows: Rows, coefficients: Tensor, matrices: Sequence[Tensor]) -> None:
    """Add `J^T coefficients`, a linear combination of rows, to matrices."""
    for block, matrix in zip(rows, matrices):
        matrix.add_(block.combined(coefficients))
