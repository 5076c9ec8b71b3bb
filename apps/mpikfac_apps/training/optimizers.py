"""The optimizer of a training run, by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mpikfac_apps.options.options import Options


def make_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the options name; for K-FAC, SGD takes the directions."""
    parameters, lr, beta = model.parameters(), options.rate, options.momentum
    decay = options.weight_decay
    match options.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters, lr, (beta, 0.999), weight_decay=decay)
        case "muon":
            return _muon(options, model)
        case "soap":
            return _soap(options, model)
    return torch.optim.SGD(parameters, lr, beta, weight_decay=decay, nesterov=options.nesterov)


def _muon(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return Muon for hidden matrices, and AdamW in the same class for all other parameters.

    `use_adjusted_lr` scales an orthogonal step to the usual size of AdamW's step [Liu et al. 2025],
    so a single learning rate serves both.
    """
    from pytorch_optimizer import Muon

    lr, beta, decay = options.rate, options.momentum, options.weight_decay
    hidden = hidden_matrices(model)
    known = set(hidden)
    others = [parameter for parameter in model.parameters() if parameter not in known]
    by_muon = {"params": hidden, "use_muon": True, "momentum": beta}
    by_adamw = {"params": others, "use_muon": False, "betas": (beta, 0.95)}
    groups = [group | {"lr": lr, "weight_decay": decay} for group in (by_muon, by_adamw)]
    return Muon(groups, use_adjusted_lr=True)


def _soap(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return SOAP, whose eigenbases are refreshed every 10 steps."""
    from pytorch_optimizer import SOAP

    betas = options.momentum, 0.95
    soap = SOAP(model.parameters(), options.rate, betas, weight_decay=options.weight_decay)
    soap.register_step_post_hook(_in_rows)
    return soap


def _in_rows(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Lay the state out as a checkpoint does: the layout of a matrix changes rounding."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value):
                state[key] = value.contiguous()
            elif isinstance(value, list):  # of matrices; an empty list stands for no matrix
                state[key] = [m.contiguous() if torch.is_tensor(m) else m for m in value]


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights of linear layers and convolutions, without the first and the last layer.

    A filter counts as a matrix `[outputs, inputs x height x width]`.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    weights = dict.fromkeys(layer.weight for layer in layers)  # layers may share a weight
    return list(weights)[1:-1]
