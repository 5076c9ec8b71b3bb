"""Equations with unknown coefficients, and their dense Jacobians by torch.func."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from mpikfac.lab import Term, jet

F64 = torch.float64
WEIGHTS = {"interior": 1.0, "border": 30.0, "pair": 0.5}


class Network(nn.Module):
    """A network with a skip connection, whose layer `middle` is called twice."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.middle = nn.Linear(2, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(self.middle(h))
        return self.last(input=torch.tanh(self.middle(h)))


def network(seed=0):
    """Return a network in float64."""
    torch.manual_seed(seed)
    return Network().double()


def unknown():
    """Return the unknown coefficient of the equation."""
    return nn.Parameter(torch.tensor([0.3, -0.7], dtype=F64))


def points(count, seed=1):
    """Return points in the unit square, equal on all ranks."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.rand(count, 2, generator=generator, dtype=F64, device="cpu")
    return drawn.to(torch.get_default_device())


def functions(nu):
    """Return residual functions: a nonlinear equation, values, and a pair of equations."""

    def interior(model, x):
        u = model(jet(x))
        u_x, u_y = u.first[:, 0], u.first[:, 1]
        return u_y + u.value * u_x - nu[0] * u.second[:, 0] + nu[1] * u.value - x.sum(1)

    def border(model, x):
        return model(x)[:, 0] - x[:, 0].sin()

    def pair(model, x):
        left, right = model(x)[:, 0], model(x + 1)[:, 0]
        return torch.stack([left - right, left * right - 0.1], 1)

    return interior, border, pair


def terms(nu, parts, weights=None):
    """Return terms of the functions at points, or tuples of points, given by name."""
    weights = WEIGHTS if weights is None else weights
    return [
        Term(function, parts[function.__name__], weights[function.__name__])
        for function in functions(nu)
    ]


def residuals(model, nu, parts, weights=None):
    """Return the weighted residuals at all points as a function of the parameters, by torch.func.

    It computes derivatives by nested transforms, and the loss is half of its squared norm.
    """
    weights = WEIGHTS if weights is None else weights

    def of(parameters):
        own = {name: value for name, value in parameters.items() if name != "nu"}
        a, b = parameters.get("nu", nu)

        def u(x):
            return functional_call(model, own, (x[None],))[0, 0]

        def interior(x):
            d, dd = grad(u)(x), hessian(u)(x)
            return d[1] + u(x) * d[0] - a * dd[0, 0] + b * u(x) - x.sum()

        def border(x):
            return u(x) - x[0].sin()

        def left(x):
            return u(x) - u(x + 1)

        def right(x):
            return u(x) * u(x + 1) - 0.1

        of_terms = {"interior": [interior], "border": [border], "pair": [left, right]}
        return torch.cat(
            [
                (weights[name] / len(parts[name])) ** 0.5 * vmap(one)(parts[name])
                for name, several in of_terms.items()
                for one in several
            ]
        )

    return of


def dense(model, nu, parts, weights=None):
    """Return residuals `[rows]` and their Jacobian `[rows, parameters]`, by torch.func.

    Parameters are ordered as in `flat`.
    """
    of = residuals(model, nu, parts, weights)
    values = {name: p.detach() for name, p in model.named_parameters()} | {"nu": nu.detach()}
    columns = jacrev(of)(values)
    return of(values), torch.cat([columns[name].flatten(1) for name in values], 1)


def flat(model, nu):
    """Return all parameters as a vector: the model's in order, then the coefficient."""
    return torch.cat([p.detach().flatten() for p in (*model.parameters(), nu)])
