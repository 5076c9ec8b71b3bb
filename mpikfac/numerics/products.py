"""Matrix products in a given precision, and products of a gradient with matrices on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac import files

LARGE = 2**24  # multiplications above which oneDNN is worthwhile for a matrix product


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b` in the precision set by `multiplying`; if none is set, use the faster library.

    `@` uses MKL. On processors not made by Intel, oneDNN multiplies float32 matrices twice as fast
    as MKL, one matrix at a time; on Intel processors, it is half as fast. oneDNN needs the second
    matrix transposed, so the product must be large enough to be worth a copy.

    Args:
        a: `[..., m, k]`.
        b: `[..., k, n]`, with the same leading dimensions.
        out: receives the product.
    """
    if (coarse := _coarse.get()) is not None:
        return coarse(a, b, out)
    work = math.prod(a.shape[-2:]) * b.shape[-1]
    if not a.is_cpu or a.dtype != torch.float32 or work < LARGE or _made_by_intel():
        return torch.matmul(a, b, out=out)
    if a.dim() == b.dim() == 3:
        found = torch.stack(list(map(product, a, b)))
    elif a.dim() == 2 and (b.T.is_contiguous() or len(a) >= 256):
        found = F.linear(a.to_mkldnn(), b.T.contiguous().to_mkldnn()).to_dense()
    else:
        found = a @ b
    return found if out is None else out.copy_(found)


@cache
def _made_by_intel() -> bool:
    try:
        return "GenuineIntel" in files.read_text("/proc/cpuinfo")
    except OSError:
        return False


# -- precision ------------------------------------------------------------------------------------


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Make `product` use one of `PRECISIONS` in the calling thread, inside the context."""
    before = _coarse.set(PRECISIONS[precision])
    try:
        yield
    finally:
        _coarse.reset(before)


def usual_precision(device: torch.device, in_background: bool) -> str:
    """Return the default precision of directions on a device.

    Args:
        in_background: whether another thread multiplies at the same time. Torch's TF32 setting is
            global to the process, and would sometimes round the products of that thread.
    """
    on_tensor_cores = device.type == "cuda" and torch.version.cuda and not in_background
    return "tf32" if on_tensor_cores else "float32"


def in_tf32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b`, with float32 operands rounded to 10 bits of mantissa, but sums in float32.

    Torch's setting, which is global to the process, is changed only during this product.
    """
    if a.dtype != torch.float32:
        return torch.matmul(a, b, out=out)
    if not _has_tensor_cores(a):
        return torch.matmul(rounded_to_tf32(a), rounded_to_tf32(b), out=out)
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        return torch.matmul(a, b, out=out)
    finally:
        settings.fp32_precision = before


def in_bfloat16(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b` in float32, with operands rounded to bfloat16; float64 is not rounded."""
    if a.dtype == torch.float64:
        return torch.matmul(a, b, out=out)
    a, b = a.bfloat16(), b.bfloat16()
    if not _has_tensor_cores(a):
        return torch.matmul(a.float(), b.float(), out=out)
    if a.dim() == 2:
        found = torch.mm(a, b, out_dtype=torch.float32)
    else:
        stacks = a.flatten(0, -3), b.flatten(0, -3)
        found = torch.bmm(*stacks, out_dtype=torch.float32).unflatten(0, a.shape[:-2])
    return found if out is None else out.copy_(found)


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Return `x` with 10-bit mantissas, rounded to nearest with ties away from zero."""
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)


def _has_tensor_cores(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.cuda is not None


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
PRECISIONS = {"float32": None, "tf32": in_tf32, "bfloat16": in_bfloat16}
_coarse = ContextVar[Multiply | None]("coarse", default=None)


# -- products of a layer's gradient with its factors ----------------------------------------------

Side = Sequence[Tensor]
"""A matrix S that multiplies a gradient on the side of A or G, as a sequence of blocks along its
diagonal: matrices `[n, n]` or diagonals `[n]`; without blocks, the identity. If the layer has
groups, blocks are `[groups, n, n]`, and the gradient is `[groups, outputs, inputs]`.

A block of low rank, U `[n, rank]`, stands for `[I U]` `[n, n + rank]`: a product with the transpose
keeps the multiplied matrix, and appends its coordinates in U."""


def from_left(side: Side, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return `S @ matrix` or `S^T @ matrix`, where S is the side's matrix."""
    if len(side) == 1:
        return _block_from_left(side[0], matrix, transpose)
    multiply = partial(_block_from_left, transpose=transpose)
    length = _length(side, matrix, _rows if transpose else _columns)
    return _block_by_block(multiply, side, matrix, -2, length)


def from_right(matrix: Tensor, side: Side, transpose: bool = False) -> Tensor:
    """Return `matrix @ S` or `matrix @ S^T`, where S is the side's matrix."""
    if len(side) == 1:
        return _block_from_right(side[0], matrix, transpose)
    multiply = partial(_block_from_right, transpose=transpose)
    length = _length(side, matrix, _columns if transpose else _rows)
    return _block_by_block(multiply, side, matrix, -1, length)


def _block_by_block(
    multiply: Callable[[Tensor, Tensor], Tensor],
    side: Side,
    matrix: Tensor,
    dim: int,
    length: Callable[[Tensor], int],
) -> Tensor:
    """Split the matrix along `dim` by the blocks' `length`, and multiply each part by its block."""
    if not side:
        return matrix
    if len(side) == 1:
        return multiply(side[0], matrix)
    parts = matrix.split([length(block) for block in side], dim)
    return torch.cat([multiply(b, part) for b, part in zip(side, parts)], dim)


def _length(
    side: Side, matrix: Tensor, of_block: Callable[[Tensor], int]
) -> Callable[[Tensor], int]:
    """Return a function for a block's length: `of_block`, or the order if blocks are diagonals."""
    return _order if side and side[0].dim() < matrix.dim() else of_block


def _order(diagonal: Tensor) -> int:
    return diagonal.shape[-1]


def _rows(block: Tensor) -> int:
    return block.shape[-2]


def _columns(block: Tensor) -> int:
    order, vectors = block.shape[-2:]
    return order if vectors == order else order + vectors


def _values(block: Tensor) -> int:
    order, vectors = block.shape[-2:]
    return order if vectors == order else 1 + vectors


def _block_from_left(block: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
    if block.dim() < matrix.dim():
        return block[..., :, None] * matrix
    if block.shape[-2] == block.shape[-1]:
        return product(block.mT if transpose else block, matrix)
    if transpose:
        return torch.cat([matrix, product(block.mT, matrix)], -2)
    order = _rows(block)
    return matrix[..., :order, :] + product(block, matrix[..., order:, :])


def _block_from_right(block: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
    if block.dim() < matrix.dim():
        return matrix * block[..., None, :]
    if block.shape[-2] == block.shape[-1]:
        return product(matrix, block.mT if transpose else block)
    if not transpose:
        return torch.cat([matrix, product(matrix, block)], -1)
    order = _rows(block)
    return matrix[..., :order] + product(matrix[..., order:], block.mT)


def of_coordinates(weights: Tensor, vectors: Side) -> Tensor:
    """Return multipliers for coordinates in `[I U]` with the same effect as `weights`.

    For a block of low rank, the weights `[..., values]` are `w_rest`, of all directions outside of
    U, followed by `w`, of the vectors in U; for all other blocks, they are returned unchanged.

    `w_rest (I - U U^T) + U diag(w) U^T` is `w_rest I + U diag(w - w_rest) U^T`. The second form
    needs neither a product with a projection nor denominators for directions outside of U.
    """
    return _block_by_block(_of_block, vectors, weights, -1, _values)


def _of_block(block: Tensor, weights: Tensor) -> Tensor:
    if block.dim() < weights.dim() or _rows(block) == block.shape[-1]:
        return weights
    outside, inside = weights[..., :1], weights[..., 1:]
    return torch.cat([outside.expand(*outside.shape[:-1], _rows(block)), inside - outside], -1)


def between(left: Side, gradient: Tensor, right: Side) -> Tensor:
    """Return `left gradient right` `[outputs, inputs]`, in the dtype of the symmetric sides."""
    dtype = (*left, *right, gradient)[0].dtype
    return from_right(from_left(left, gradient.to(dtype)), right, transpose=True)
