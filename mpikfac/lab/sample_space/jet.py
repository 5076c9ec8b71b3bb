"""Compute a model's values and its first and second derivatives along directions, in forward mode.

A `Jet` passes through a plain torch model by means of `__torch_function__`: each function that the
model calls has a rule that is applied to the value and all derivatives (the streams) at once. A
linear layer therefore sees a point's streams as positions that share its weight, and an ordinary
backward pass yields the derivatives with respect to the weights.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Rule = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A function of a value and other arguments that returns f, f' and f'' for each element."""


def jet(x: Tensor, directions: Tensor | None = None) -> Jet:
    """Return points for which a model also computes its derivatives along directions.

        u = model(mpikfac.lab.jet(x))
        residual = u.second.sum(1) - f(x)  # the Laplacian

    The mixed derivative along e1 and e2 is a quarter of the difference between the second
    derivatives along e1 + e2 and e1 - e2. Tensors that a model combines with jets are treated as
    constants.

    Args:
        x: floating-point points, `[points, inputs]`.
        directions: `[directions, inputs]`, or `[points, directions, inputs]` if they depend on the
            point, for example `normals[:, None]`; None for the axes.

    Raises:
        ValueError: `x` has the wrong shape or dtype, or `directions` has the wrong shape.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x={x.dtype} {list(x.shape)} must be floating point [points, inputs]")
    if directions is None:
        directions = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    if (
        directions.ndim not in (2, 3)
        or directions.shape[-1] != x.shape[1]
        or (directions.ndim == 3 and len(directions) != len(x))
    ):
        raise ValueError(
            f"directions has shape {list(directions.shape)}, but must have shape [k, {x.shape[1]}] "
            f"or [{len(x)}, k, {x.shape[1]}], for k directions"
        )
    if directions.ndim == 2 and len(directions) == len(x) > x.shape[1]:
        raise ValueError(
            f"directions {list(directions.shape)} would all be used at each of the {len(x)} "
            f"points; for one per point, such as normals, use normals[:, None]"
        )
    first = directions.to(x).expand(len(x), -1, -1)
    return Jet(torch.cat([x[:, None], first, torch.zeros_like(first)], 1))


class Jet:
    """Values of functions of points, with first and second derivatives along k directions.

    A jet takes the place of a tensor `[points, ...]` in a model. `Jet.rules` contains the rules of
    elementwise functions by the name of the torch function. You can add other rules:

        Jet.rules["erf"] = lambda v: (f, first, second)  # tensors with the shape of v

    Args:
        streams: `[points, 1 + 2k, ...]`: the value, k first derivatives and k second derivatives.
    """

    rules: ClassVar[dict[str, Rule]] = {}
    __array_ufunc__ = None  # numpy scalars then leave operations with jets to `Jet`

    def __init__(self, streams: Tensor) -> None:
        self.streams = streams

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Apply the rule for a torch function.

        Raises:
            NotImplementedError: there is no rule for the function.
        """
        return _call(function.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the tensor method `name`, such as `tanh`, which applies the function's rule."""
        if name.startswith("_") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(f"a jet has no attribute {name!r}")
        return partial(_call, name, self)

    @property
    def directions(self) -> int:
        """The number of directions, k."""
        return self.streams.shape[1] // 2

    @property
    def value(self) -> Tensor:
        """The values, `[points, features]`, or `[points]` for a single feature."""
        return self._single[:, 0]

    @property
    def first(self) -> Tensor:
        """The first derivatives, `[points, k, features]`, or `[points, k]` for a single feature."""
        return self._single[:, 1 : 1 + self.directions]

    @property
    def second(self) -> Tensor:
        """The second derivatives, in the same shape as `first`."""
        return self._single[:, 1 + self.directions :]

    @property
    def _single(self) -> Tensor:
        """The streams, without the feature dimension if there is a single feature."""
        single = self.streams.ndim == 3 and self.streams.shape[2] == 1
        return self.streams[..., 0] if single else self.streams

    @property
    def shape(self) -> torch.Size:
        """The shape of the values within the model, `[points, ...]`, even for a single feature."""
        return torch.Size((self.streams.shape[0], *self.streams.shape[2:]))

    @property
    def ndim(self) -> int:
        """The number of dimensions of the values within the model."""
        return self.streams.ndim - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values and derivatives."""
        return self.streams.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values and derivatives."""
        return self.streams.device

    def __len__(self) -> int:
        return len(self.streams)

    def __repr__(self) -> str:
        return f"Jet({list(self.shape)}, directions={self.directions}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> Jet:
        return _select(self, index)

    def __neg__(self) -> Jet:
        return Jet(-self.streams)

    def __add__(self, other: Any) -> Jet:
        return _add(self, other)

    def __sub__(self, other: Any) -> Jet:
        return _subtract(self, other)

    def __rsub__(self, other: Any) -> Jet:
        return _add(-self, other)

    def __mul__(self, other: Any) -> Jet:
        return _multiply(self, other)

    def __truediv__(self, other: Any) -> Jet:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Jet:
        return _divide(other, self)

    def __pow__(self, exponent: Any) -> Jet:
        return _call("pow", self, exponent)

    def __rpow__(self, base: Any) -> Jet:
        return _call("pow", base, self)

    def __matmul__(self, matrix: Any) -> Jet:
        return _matmul(self, matrix)

    def __iadd__(self, other: Any) -> Jet:
        raise NotImplementedError("a jet cannot be changed in place; write h = h + 1, not h += 1")

    __isub__ = __imul__ = __itruediv__ = __ipow__ = __iadd__
    __radd__ = __add__
    __rmul__ = __mul__


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Apply the rule for a torch function, given its name.

    Raises:
        NotImplementedError: there is no rule for the function, or it does not take the arguments.
    """
    rule = FUNCTIONS.get(name)
    if rule is None and name not in Jet.rules:
        raise NotImplementedError(
            f"a jet has no rule for torch's {name!r}; select features with p[:, :1], use "
            f"{', '.join(Jet.rules)}, or add an elementwise function as Jet.rules[{name!r}]"
        )
    try:
        return rule(*args, **kwargs) if rule else _elementwise(Jet.rules[name], *args, **kwargs)
    except (IndexError, TypeError) as error:
        raise NotImplementedError(
            f"a jet's {name!r} does not take these arguments; pass the jet first, and pass tensors "
            f"as positional arguments ({error})"
        ) from error


# -- functions of several elements -----------------------------------------------------------------


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Jet:
    """Apply a linear layer; its bias is added to the value only."""
    if not isinstance(x, Jet) or isinstance(weight, Jet) or x.ndim < 2:
        raise NotImplementedError("linear needs a jet [points, ..., inputs] and a tensor as weight")
    streams = F.linear(x.streams, weight)
    return Jet(streams if bias is None else streams + _constant(x, bias))


def _matmul(x: Any, matrix: Any) -> Jet:
    if not isinstance(matrix, Tensor) or matrix.ndim != 2:
        raise NotImplementedError("a jet [points, ..., inputs] can only be multiplied by a matrix")
    return _linear(x, matrix.T)


def _add(x: Any, y: Any, *, alpha: float = 1) -> Jet:
    y = y if alpha == 1 else y * alpha
    x, y = (x, y) if isinstance(x, Jet) else (y, x)
    return Jet(x.streams + (_matching(x, y).streams if isinstance(y, Jet) else _constant(x, y)))


def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Jet:
    return _add(x, y * -alpha)


def _multiply(x: Any, y: Any) -> Jet:
    if not isinstance(x, Jet):
        x, y = y, x
    if not isinstance(y, Jet):
        return Jet(x.streams * _aligned(x, y))
    (a, a1, a2), (b, b1, b2) = _parts(x), _parts(_matching(x, y))
    return Jet(torch.cat([a * b, a1 * b + a * b1, a2 * b + 2 * a1 * b1 + a * b2], 1))


def _divide(x: Any, y: Any) -> Jet:
    if isinstance(y, Jet):
        return _multiply(x, _elementwise(_power, y, -1))
    return Jet(x.streams / _aligned(x, y))


def _select(x: Jet, index: Any) -> Jet:
    """Select features of a jet by an index that keeps all points."""
    index = index if isinstance(index, tuple) else (index,)
    first, *parts = index or (None,)
    if first is not Ellipsis and not (isinstance(first, slice) and first == slice(None)):
        raise NotImplementedError("select points before `jet`: an index must begin with : or ...")
    if len([part for part in parts if part is not None and part is not Ellipsis]) >= x.ndim:
        raise NotImplementedError("select points before `jet`: the index has too many items")
    lists = [torch.as_tensor(part) for part in parts if isinstance(part, list | Tensor | bool)]
    lists = [part for part in lists if part.ndim or part.dtype == torch.bool]
    if len(lists) > 1 or any(part.ndim != 1 for part in lists):
        raise NotImplementedError(
            "an index of a jet must contain at most one list or tensor, which must be "
            "one-dimensional; select in several steps"
        )
    return Jet(x.streams[index if first is Ellipsis else (slice(None), *index)])


def _join(function: Callable[..., Tensor], more: int, tensors: Sequence[Any], dim: int = 0) -> Jet:
    """Join jets, and tensors as constants, along a feature dimension.

    Args:
        more: the number of dimensions that the function adds.
    """
    like = next(each for each in tensors if isinstance(each, Jet))
    dim = _dimension(dim, like.ndim + more)
    all_streams = [
        _matching(like, each).streams
        if isinstance(each, Jet)
        else _constant(like, each).expand(len(like), -1, *each.shape[1:])
        for each in tensors
    ]
    return Jet(function(all_streams, dim))


def _along(function: Callable[..., Tensor], more: int, x: Jet, dim: int = 0, **kwargs: Any) -> Jet:
    """Apply a linear function along a feature dimension."""
    return Jet(function(x.streams, _dimension(dim, x.ndim + more), **kwargs))


def _reduce(
    function: Callable[..., Tensor],
    x: Jet,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
) -> Jet:
    """Apply a sum or mean along feature dimensions."""
    dims = dim if axis is None else axis
    dims = dims or [0] if isinstance(dims, list | tuple) or dims is None else [dims]
    return Jet(function(x.streams, [_dimension(each, x.ndim) for each in dims], keepdim))


def _in_parts(function: Callable[..., Sequence[Tensor]], x: Jet, *args: Any, dim: int = 0) -> Any:
    """Split the features, and return the parts as jets."""
    return tuple(map(Jet, function(x.streams, *args, dim=_dimension(dim, x.ndim))))


def _dropout(x: Jet, training: bool = True, **_: Any) -> Jet:
    if training:
        raise NotImplementedError("a jet cannot pass through dropout in training mode; call eval()")
    return x


def _dimension(dim: int, ndim: int) -> int:
    """Convert a dimension of the values to the corresponding dimension of the streams.

    Raises:
        NotImplementedError: the dimension is that of the points.
    """
    if not -ndim < dim < ndim or dim == 0:
        raise NotImplementedError(
            f"dim={dim} of a jet must be in [1, {ndim}), because operations must not mix points"
        )
    return dim % ndim + 1


def _parts(x: Jet) -> tuple[Tensor, Tensor, Tensor]:
    """Return the value, and the first and second derivatives, `[points, 1 or k, ...]`."""
    k = x.directions
    return x.streams[:, :1], x.streams[:, 1 : 1 + k], x.streams[:, 1 + k :]


def _matching(x: Jet, y: Jet) -> Jet:
    """Return y after checking that it has as many directions and dimensions as x.

    Raises:
        ValueError: the numbers of directions or of dimensions differ.
    """
    if (x.directions, x.ndim) != (y.directions, y.ndim):
        raise ValueError(f"{x} and {y} must have equal numbers of directions and dimensions")
    return y


def _aligned(x: Jet, constant: Any) -> Any:
    """Return a constant that can be broadcast to the streams of x.

    Raises:
        ValueError: the constant is not a number or tensor, or has more dimensions than x.
    """
    if not isinstance(constant, Tensor | numbers.Real):
        raise ValueError(
            f"a jet must be combined with numbers, tensors and jets, not {type(constant).__name__};"
            f" use torch.as_tensor(...)"
        )
    if not isinstance(constant, Tensor) or constant.ndim < x.ndim:
        return constant
    if constant.ndim > x.ndim:
        raise ValueError(
            f"a tensor {list(constant.shape)} must not have more dimensions than {x}; give it the "
            f"shape of the features"
        )
    return constant[:, None]


def _constant(x: Jet, constant: Any) -> Tensor:
    """Return the streams of a constant, whose derivatives are zero."""
    aligned = torch.as_tensor(_aligned(x, constant), dtype=x.dtype, device=x.device)
    aligned = aligned.reshape((1,) * (x.streams.ndim - aligned.ndim) + aligned.shape)
    return F.pad(aligned, (0, 0) * (x.streams.ndim - 2) + (0, 2 * x.directions))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "add": _add,
    "sub": _subtract,
    "rsub": lambda x, y: _add(-x, y),
    "neg": lambda x: -x,
    "mul": _multiply,
    "div": _divide,
    "true_divide": _divide,
    "cat": partial(_join, torch.cat, 0),
    "stack": partial(_join, torch.stack, 1),
    "sum": partial(_reduce, torch.sum),
    "mean": partial(_reduce, torch.mean),
    "split": lambda x, size, dim=0: _in_parts(torch.split, x, size, dim=dim),
    "chunk": lambda x, chunks, dim=0: _in_parts(torch.chunk, x, chunks, dim=dim),
    "unbind": lambda x, dim=0: _in_parts(torch.unbind, x, dim=dim),
    "dropout": _dropout,
    "squeeze": partial(_along, torch.squeeze, 0),
    "unsqueeze": partial(_along, torch.unsqueeze, 1),
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: x.ndim,
}
"""Functions that accept jets in addition to `Jet.rules`, by the name of the torch function."""


# -- functions of single elements ------------------------------------------------------------------


def _elementwise(rule: Rule, x: Jet, *args: Any, inplace: bool = False, **kwargs: Any) -> Jet:
    """Apply a function to each element; derivatives follow from the chain rule."""
    if inplace:
        raise NotImplementedError("a jet cannot be changed in place; set inplace=False")
    if not isinstance(x, Jet):
        raise TypeError(f"the first argument must be a jet, not {x!r}")
    value, first, second = _parts(x)
    f, d, dd = rule(value, *args, **kwargs)
    return Jet(torch.cat([f, d * first, d * second + dd * first.square()], 1))


def _tanh(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f = torch.tanh(v)
    d = 1 - f * f
    return f, d, -2 * f * d


def _sin(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f = torch.sin(v)
    return f, torch.cos(v), -f


def _cos(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f = torch.cos(v)
    return f, -torch.sin(v), -f


def _exp(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f = torch.exp(v)
    return f, f, f


def _sigmoid(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f = torch.sigmoid(v)
    d = f * (1 - f)
    return f, d, d * (1 - 2 * f)


def _silu(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    f, d, dd = _sigmoid(v)
    return v * f, f + v * d, 2 * d + v * dd


def _softplus(v: Tensor, beta: float = 1, threshold: float = 20) -> tuple[Tensor, Tensor, Tensor]:
    s, d, _ = _sigmoid(beta * v)
    smooth = beta * v <= threshold  # above the threshold, torch's softplus is the identity
    return F.softplus(v, beta, threshold), torch.where(smooth, s, 1), beta * d * smooth


def _gelu(v: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor, Tensor]:
    if approximate == "tanh":
        c, cubic = math.sqrt(2 / math.pi), 0.044715
        t, d, dd = _tanh(c * (v + cubic * v**3))
        inner, curved = c * (1 + 3 * cubic * v * v), 6 * c * cubic * v
        d, dd = d * inner, dd * inner.square() + d * curved
        return v * (1 + t) / 2, (1 + t + v * d) / 2, d + v * dd / 2
    cumulative = (1 + torch.erf(v / math.sqrt(2))) / 2
    density = torch.exp(-v * v / 2) / math.sqrt(2 * math.pi)
    return v * cumulative, cumulative + v * density, (2 - v * v) * density


def _log(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.log(v), 1 / v, -1 / v.square()


def _power(v: Tensor, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(exponent, int | float):
        raise NotImplementedError("the exponent of a jet must be a number")
    f = v**exponent
    factors = exponent, exponent * (exponent - 1)  # where a factor is 0, v**(...) might be infinite
    d, dd = (
        factor * v ** (exponent - order) if factor else torch.zeros_like(v)
        for order, factor in enumerate(factors, 1)
    )
    return f, d, dd


Jet.rules |= {
    "tanh": _tanh,
    "sin": _sin,
    "cos": _cos,
    "exp": _exp,
    "log": _log,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "softplus": _softplus,
    "gelu": _gelu,
    "pow": _power,
    "square": partial(_power, exponent=2),
    "sqrt": partial(_power, exponent=0.5),
    "reciprocal": partial(_power, exponent=-1),
}
