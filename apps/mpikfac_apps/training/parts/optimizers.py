"""Create a run's optimizer, freeze layers in the first epochs, and average the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim.swa_utils import AveragedModel, update_bn

from mpikfac.model import fitting, laid_out
from mpikfac_apps.inspecting.weights import last_module
from mpikfac_apps.options.options import Options

AVERAGED = "run/averaged"  # a checkpoint item: the number of steps in the average


def make_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the options select; K-FAC uses SGD to apply its directions."""
    parameters, lr, beta = model.parameters(), options.rate, options.momentum
    decay = options.weight_decay
    match options.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters, lr, (beta, 0.999), weight_decay=decay)
        case "muon":
            return _muon(options, model)
        case "soap":
            return _soap(options, model)
        case "lars" | "lamb":
            return _by_layer(options, model)
    beta = 0.0 if options.momentum_of_gradients else beta
    return torch.optim.SGD(parameters, lr, beta, weight_decay=decay, nesterov=options.nesterov)


def _muon(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that applies Muon to hidden matrices and AdamW to other parameters.

    `use_adjusted_lr` scales an orthogonal step to the typical size of AdamW's step [Liu et al.
    2025], so a single learning rate suits both.
    """
    from pytorch_optimizer import Muon

    lr, beta, decay = options.rate, options.momentum, options.weight_decay
    hidden = hidden_matrices(model)
    hidden_set = set(hidden)
    others = [parameter for parameter in model.parameters() if parameter not in hidden_set]
    by_muon = {"params": hidden, "use_muon": True, "momentum": beta}
    by_adamw = {"params": others, "use_muon": False, "betas": (beta, 0.95)}
    groups = [group | {"lr": lr, "weight_decay": decay} for group in (by_muon, by_adamw)]
    return Muon(groups, use_adjusted_lr=True)


def _soap(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return SOAP, whose eigenbases are refreshed every 10 steps."""
    from pytorch_optimizer import SOAP

    betas = options.momentum, 0.95
    soap = SOAP(model.parameters(), options.rate, betas, weight_decay=options.weight_decay)
    soap.register_step_post_hook(_lay_out)
    return soap


def _by_layer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return LARS or LAMB, which scale each layer's step by the norm of the layer's weights."""
    from pytorch_optimizer import LARS, Lamb

    parameters, lr, beta = model.parameters(), options.rate, options.momentum
    decay = options.weight_decay
    if options.optimizer == "lars":
        return LARS(parameters, lr, weight_decay=decay, momentum=beta)
    # Without adam_debias, the package applies the bias correction 1 / (1 - beta1^t) twice.
    return Lamb(parameters, lr, (beta, 0.999), weight_decay=decay, adam_debias=True)


def _lay_out(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give the optimizer's state the memory layout that it has after a restart.

    Otherwise, the rounding of later steps would depend on whether the run was restarted.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                state[key] = laid_out(value, parameter)
            elif isinstance(value, list):  # matrices; an empty list stands for no matrix
                state[key] = [m.contiguous() if torch.is_tensor(m) else m for m in value]


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights of linear layers and convolutions, except in the first and last layer.

    A convolution's weight counts as a matrix `[outputs, inputs x height x width]`. The first layer
    can be an embedding.
    """
    kinds = nn.Linear | nn.Embedding | _ConvNd
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    # a weight that several layers share has a single entry
    entries = {layer.weight: isinstance(layer, nn.Embedding) for layer in layers}
    return [weight for weight in list(entries)[1:-1] if not entries[weight]]


def decays_and_momenta(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Return each parameter group's weight decay and momentum, if it has them."""
    names = "weight_decay", "momentum"
    return [{n: group[n] for n in names if n in group} for group in optimizer.param_groups]


def follow_options(optimizer: torch.optim.Optimizer, numbers: Sequence[dict[str, float]]) -> None:
    """Set the hyperparameters `numbers` of each parameter group again, after loading a state."""
    for group, group_numbers in zip(optimizer.param_groups, numbers):
        group.update(group_numbers)


class Frozen:
    """Freeze all layers except the last module with parameters during the first epochs.

    Parameters that the network itself freezes stay frozen.

    Collective over: none; no method is collective.

    Attributes:
        last: the name of the last module with parameters, which is trained from the beginning.
    """

    def __init__(self, model: nn.Module, epochs: int) -> None:
        self.last, self._epochs = last_module(model), epochs
        named = [(name.rpartition(".")[0], p) for name, p in model.named_parameters()]
        self._layers = [p for module, p in named if p.requires_grad and module != self.last]

    def begin_epoch(self, epoch: int) -> None:
        """Freeze the layers in the first epochs, and unfreeze them in later ones."""
        for parameter in self._layers:
            parameter.requires_grad_(epoch >= self._epochs)


class Average:
    """An exponential average of a model's weights over steps, equal on all ranks.

    The k-th update is `average <- xi average + (1 - xi) weights` with `xi = min(1 - 1/k, decay)`
    [Martens & Grosse 2015], so the initial value has no influence.

    Collective over: none; no method is collective.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._averaged = AveragedModel(model, multi_avg_fn=_towards(decay))

    def add(self, model: nn.Module) -> None:
        """Update the average with the model's weights; call this after each step."""
        self._averaged.update_parameters(model)

    def model(self, inputs: Iterable[Tensor]) -> nn.Module:
        """Return a model with the averaged weights.

        BatchNorm's running statistics are recomputed from the batches of `inputs`, because they
        depend on the weights.
        """
        update_bn(inputs, self._averaged.module)
        return self._averaged.module

    def state(self) -> dict[str, Any]:
        """Return the items to store in a checkpoint."""
        values = self._averaged.module.state_dict()
        weights = {f"average/{name}": value for name, value in values.items()}
        return {**weights, AVERAGED: int(self._averaged.n_averaged)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`.

        Raises:
            ValueError: an item is missing or invalid.
        """
        items = fitting(state, self.state())
        steps = items.pop(AVERAGED)
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"item {AVERAGED!r} must be a number of steps; it is {steps}")
        values = {name.removeprefix("average/"): value for name, value in items.items()}
        self._averaged.module.load_state_dict(values)
        self._averaged.n_averaged.fill_(steps)


def _towards(decay: float) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | int], None]:
    """Return the averaging function for torch's `AveragedModel`.

    The last argument of the returned function is the number of earlier updates.
    """

    def move(averages: Sequence[Tensor], weights: Sequence[Tensor], steps: Tensor | int) -> None:
        torch._foreach_lerp_(list(averages), list(weights), max(1 / (int(steps) + 1), 1 - decay))

    return move
