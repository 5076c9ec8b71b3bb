"""Load a model to check: the module, the inputs, and the modules that the library rejects."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.problems import models, own

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model in float64, with inputs and coverage.

    Attributes:
        coverage: which modules K-FAC covers; modules that the library rejects are skipped.
        refused: the names of modules that cannot be covered, each with the library's message.
        inputs: the shape of an example.
        tokens: the vocabulary size if examples are tokens; None if they are real numbers.
        outputs: the shape of the model's output for an example: classes, and positions if any.
    """

    model: nn.Module
    coverage: mpikfac.Coverage
    refused: Mapping[str, str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tokens: int | None

    def copied(self) -> nn.Module:
        """Return a copy of the model with the same weights, in training mode."""
        return copy.deepcopy(self.model).train()

    def batch(self, examples: int, seed: int) -> Batch:
        """Return random examples and labels."""
        generator = torch.Generator().manual_seed(seed)
        inputs = own.drawn((examples, *self.inputs), self.tokens, generator)
        classes, *positions = self.outputs
        return inputs, torch.randint(classes, (examples, *positions), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy; random draws, such as dropout masks, are always the same."""
    torch.manual_seed(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def check_passes(subject: Subject, examples: int, ranks: int) -> None:
    """Run a forward and backward pass in train() mode and, with several ranks, in eval() mode.

    Raises:
        ValueError: the model's own code raises an error; the message is one line.
    """
    for training in [True] if ranks == 1 else [True, False]:
        mode = "train" if training else "eval"
        with own.one_line_errors(f"a pass of the model in {mode}() mode with {examples} examples"):
            loss(subject.copied().train(training), subject.batch(examples, seed=0)).backward()


def named_subject(
    name: str, inputs: tuple[int, ...] | None, classes: int, tokens: int | None = None
) -> Subject:
    """Return the network `name` as a subject.

    Raises:
        ValueError: no network has this name, the network rejects the input or has nothing to train,
            `inputs` is needed but missing, or `tokens` does not apply to the network.
    """
    torch.manual_seed(0)
    entry = models.network(name)
    if entry.image and tokens is not None:
        raise ValueError(f"--tokens {tokens} needs a model of your own, not {name}")
    inputs = inputs or entry.image
    if inputs is None:
        raise ValueError("your own model needs --input, such as 3,32,32")
    model = models.build(name, classes, inputs[0])
    return subject_of(model, entry.covers, inputs, tokens or entry.tokens(classes))


def subject_of(
    model: nn.Module,
    covers: mpikfac.layers.Kinds,
    inputs: tuple[int, ...],
    tokens: int | None = None,
) -> Subject:
    """Return a model in float64, with inputs and coverage.

    Raises:
        ValueError: the module rejects the input, or has nothing to train.
    """
    model = model.double()
    two = own.drawn((2, *inputs), tokens, torch.Generator().manual_seed(0))
    outputs = tuple(own.outputs_of(model, two).shape[1:])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")
    refused = refusals(model, covers)
    coverage = mpikfac.Coverage(list(refused), covers)
    return Subject(model, coverage, refused, inputs, outputs, tokens)


# -- modules that the library rejects ------------------------------------------------------------


def refusals(model: nn.Module, covers: mpikfac.layers.Kinds) -> dict[str, str]:
    """Return the names of modules that cannot be covered, each with the library's message."""
    try:
        mpikfac.layers.cover(model, mpikfac.Coverage(covers=covers))
    except mpikfac.layers.Refused as error:
        return error.reasons
    return {}
