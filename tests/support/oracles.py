"""The tests' reference: K-FAC by definition, with im2col and dense solves, in one process.

No code in this file is fast, distributed, or taken from the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac import SGDGrafting
from mpikfac.plan import Grafting
from mpikfac.preconditioners import Inverse, Preconditioner
from mpikfac_apps.checking.reference import kronecker_solve, tikhonov_solve

Batch = tuple[Tensor, Tensor]
UNSPLIT = Inverse(split_damping=False)


def kfac_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every `Linear` and `Conv2d` by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def input_vectors(module: nn.Module, x: Tensor) -> Tensor:
    """Return all vectors `a` `[vectors, inputs]` of an input, by im2col, with a 1 for a bias."""
    if isinstance(module, nn.Conv2d):
        columns = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        x = columns.transpose(1, 2)
    rows = x.reshape(-1, x.shape[-1])
    return rows if module.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def weight_vectors(module: nn.Module, x: Tensor) -> Tensor:
    """Return all vectors `a` `[batch, positions, groups, inputs]`, which multiply weights and bias.

    They come from autograd, as an output's gradient for its own weights, in a convolution or
    transposed convolution with a single output per group.
    """
    names = [name for name, _ in module.named_parameters()]

    def outputs(*given: Tensor) -> Tensor:
        y = torch.func.functional_call(module, dict(zip(names, given)), x)
        return y.sum(1).flatten(1)  # only one output depends on a weight

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(module.parameters()))
    parts = [j.reshape(*j.shape[:2], module.groups, -1) for j in jacobians]
    return torch.cat(parts, -1)


def output_vectors(g: Tensor, outputs: int) -> Tensor:
    """Return all vectors `g` `[vectors, outputs]` of the gradient at a layer's output."""
    return (g.permute(0, 2, 3, 1) if g.dim() == 4 else g).reshape(-1, outputs)


def calls(
    model: nn.Module, batch: Batch, loss: Callable[..., Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return all vectors `a` and `g` of every layer; keep the gradients of the mean loss."""
    outputs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        output.retain_grad()
        outputs.setdefault(name, []).append((input_vectors(module, inputs[0].detach()), output))
        return output.clone()  # in-place activations after the layer must not change it

    modules = kfac_modules(model)
    hooks = [m.register_forward_hook(partial(keep, name)) for name, m in modules.items()]
    x, y = batch
    loss(model(x), y).backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for name, seen in outputs.items():
        a = torch.cat([a for a, _ in seen])
        g = torch.cat([output_vectors(o.grad, len(modules[name].weight)) for _, o in seen])
        found[name] = a, g
    return found


def factors(model: nn.Module, batch: Batch, loss=F.cross_entropy) -> dict[str, Tensor]:
    """Return A and G of every layer, as means over all vectors; keep the mean loss's gradients."""
    found = {}
    for name, (a, g) in calls(model, batch, loss).items():
        found[f"{name}.A"] = a.T @ a / len(a)
        found[f"{name}.G"] = len(batch[0]) * g.T @ g
    return found


def vectors(model: nn.Module, batch: Batch, loss=F.cross_entropy) -> dict[str, Tensor]:
    """Return Eva's vectors of every layer, the means of the inputs and of the examples' gradients.

    Gradients are multiplied by the square root of the number of positions of an example, because G
    is multiplied by that number.
    """
    found = {}
    for name, (a, g) in calls(model, batch, loss).items():
        positions = len(g) / len(batch[0])
        found[f"{name}.A"] = a.mean(0)
        found[f"{name}.G"] = math.sqrt(positions) * (len(batch[0]) * g).mean(0)
    return found


def running_average(history: Sequence[Tensor], decay: float, start: str = "first") -> Tensor:
    """Return the mean of all factors so far, weighted by `decay` to the power of their age."""
    terms = [(decay**age, factor) for age, factor in enumerate(reversed(history))]
    if start == "identity":
        eye = torch.eye(len(history[0]), dtype=history[0].dtype)
        terms.append((decay ** len(history) / (1 - decay), eye))
    return sum(w * factor for w, factor in terms) / sum(w for w, _ in terms)


def unsplit_solve(gradient: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """Return `(G + damping I)^-1 gradient (A + damping I)^-1`."""
    damped_a, damped_g = (m + damping * torch.eye(len(m), dtype=m.dtype) for m in (a, g))
    return torch.linalg.solve(damped_g, gradient) @ torch.linalg.inv(damped_a)


def eva_solve(gradient: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """Return `(g g^T (x) a a^T + damping I)^-1 gradient`, with the product written out."""
    return kronecker_solve(gradient, torch.outer(a, a), torch.outer(g, g), damping)


def relative_solve(
    preconditioner: str | Preconditioner, gradient: Tensor, a: Tensor, g: Tensor, damping: float
) -> Tensor:
    """Return a preconditioner's direction, damped in units of mean eigenvalues."""
    means = a.trace() / len(a), g.trace() / len(g)
    if preconditioner == "eigen":
        return kronecker_solve(gradient, a, g, damping * means[0] * means[1])
    share = damping**0.5 if preconditioner == "inverse" else damping
    damped = (m + share * mean * torch.eye(len(m), dtype=m.dtype) for m, mean in zip((a, g), means))
    damped_a, damped_g = damped
    return torch.linalg.solve(damped_g, gradient) @ torch.linalg.inv(damped_a)


SOLVES: dict[str | Preconditioner, Callable[..., Tensor]] = {
    "eigen": kronecker_solve,
    "inverse": tikhonov_solve,
    UNSPLIT: unsplit_solve,
    "eva": eva_solve,
}


def gradient_matrix(module: nn.Module) -> Tensor:
    """Return gradients of weight and bias as one matrix `[outputs, inputs]`."""
    parts = [module.weight.grad.flatten(1)]
    if module.bias is not None:
        parts.append(module.bias.grad[:, None])
    return torch.cat(parts, 1)


def set_gradient(module: nn.Module, matrix: Tensor) -> None:
    """Set gradients from a matrix: the inverse of `gradient_matrix`."""
    if module.bias is not None:
        module.bias.grad = matrix[:, -1].clone()
        matrix = matrix[:, :-1]
    module.weight.grad = matrix.reshape(module.weight.shape).clone()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Sequence[Batch]],
    *,
    damping: float,
    factor_update_steps: int,
    inv_update_steps: int,
    factor_decay: float,
    kl_clip: float | None,
    norm_clip: float | None = None,
    fisher_clip: float | None = None,
    grafting: Grafting | None = None,
    preconditioner: str | Preconditioner = "eigen",
    initial_factor: str = "first",
    relative_damping: bool = False,
    sources: Mapping[str, int] | None = None,
) -> list[float]:
    """Train on the joined shards of every step; return the clip's factors.

    Args:
        sources: for each factor, the shard from which it is computed; all shards if None.
    """
    history: list[dict[str, Tensor]] = []
    used: dict[str, Tensor] = {}
    scales = []
    solve = partial(relative_solve, preconditioner) if relative_damping else SOLVES[preconditioner]
    estimate = vectors if preconditioner == "eva" else factors
    for step, shards in enumerate(steps):
        if step % factor_update_steps == 0:
            history.append(_factors_of(estimate, model, shards, sources))
        optimizer.zero_grad()
        factors(model, _joined(shards))
        if step % inv_update_steps == 0:
            names = history[0]
            used = {
                n: running_average([h[n] for h in history], factor_decay, initial_factor)
                for n in names
            }
        solve_now = partial(_grafted, solve) if isinstance(grafting, SGDGrafting) else solve
        bounds = {"kl": kl_clip, "norm": norm_clip, "fisher": fisher_clip}
        scales.append(_precondition(model, optimizer, used, damping, bounds, solve_now))
        optimizer.step()
    return scales


def _factors_of(
    estimate: Callable[..., dict[str, Tensor]],
    model: nn.Module,
    shards: Sequence[Batch],
    sources: Mapping[str, int] | None,
) -> dict[str, Tensor]:
    if sources is None:
        return estimate(model, _joined(shards))
    of_shard = [estimate(model, shard) for shard in shards]
    return {name: of_shard[shard][name] for name, shard in sources.items()}


def _joined(shards: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards])


def _grafted(
    solve: Callable[..., Tensor], gradient: Tensor, a: Tensor, g: Tensor, damping: float
) -> Tensor:
    """Return the direction of `solve`, scaled to the gradient's length."""
    direction = solve(gradient, a, g, damping)
    return direction * (gradient.norm() / direction.norm())


def _precondition(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    used: Mapping[str, Tensor],
    damping: float,
    bounds: Mapping[str, float | None],
    solve: Callable[..., Tensor],
) -> float:
    lr_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    modules = kfac_modules(model)
    directions, divergence, square = {}, 0.0, 0.0
    for name, module in modules.items():
        gradient = gradient_matrix(module)
        directions[name] = solve(gradient, used[f"{name}.A"], used[f"{name}.G"], damping)
        along = float((directions[name] * gradient).sum())
        divergence += along * lr_of[id(module.weight)] ** 2
        square += along
    whole = torch.cat([direction.flatten() for direction in directions.values()])
    found = {"kl": abs(divergence), "norm": float(whole.norm()), "fisher": square**0.5}
    shares = {n: bound / found[n] for n, bound in bounds.items() if bound is not None}
    scale = min([1.0, *(share**0.5 if n == "kl" else share for n, share in shares.items())])
    for name, module in modules.items():
        set_gradient(module, scale * directions[name])
    return scale
