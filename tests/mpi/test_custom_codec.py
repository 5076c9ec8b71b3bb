"""An encoding that a user defines is sent, fed back and planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from mpikfac import Compression, FirstOrderTrainer, Strategy, Trace
from mpikfac.plan import Codec, Compressor

SHAPE = 16, 16


class SignCodec(Codec):
    """Signs, and the mean size of all values."""

    name: ClassVar[str] = "sign"

    def size(self, elements, itemsize):
        return itemsize + elements if elements else 0

    def encode(self, values):
        scale = values.abs().mean().view(1).view(torch.uint8)
        return torch.cat([scale, values.sign().to(torch.int8).view(torch.uint8)])

    def add_decoded(self, total, encoded, weight):
        size = total.element_size()
        scale = encoded[:size].clone().view(total.dtype)
        total += weight * scale * encoded[size:].view(torch.int8).to(total)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sign(Compressor):
    """Send signs."""

    name: ClassVar[str] = "sign"
    gradients_only: ClassVar[bool] = True
    of_values: ClassVar[bool] = False

    def codec(self, layout, feedback):
        return SignCodec(feedback=feedback)


def signs(values):
    """Return what a rank sends."""
    return np.sign(values) * np.abs(values).mean()


def test_an_own_encoding_is_summed_over_ranks_with_feedback(comm):
    """Oracle: numpy, for the gradients of all ranks; the bytes by hand."""
    torch.manual_seed(0)
    model = nn.Linear(*SHAPE, bias=False).double()
    strategy = Strategy(compression=Compression(gradients=Sign()))
    optimizer, trace = torch.optim.SGD(model.parameters(), lr=1.0), Trace()
    trainer = FirstOrderTrainer(model, optimizer, comm, strategy=strategy, trace=trace)
    random = np.random.default_rng(0)
    weight = model.weight.detach().numpy().copy()
    errors = np.zeros((comm.size, *SHAPE))
    for _ in range(3):
        gradients = random.normal(size=(comm.size, *SHAPE))
        model.weight.grad = torch.from_numpy(gradients[comm.rank].copy())
        trainer.step()
        if comm.size == 1:  # nothing is sent
            weight -= gradients[0]
        else:
            given = gradients / comm.size + errors
            sent = np.stack([signs(of_rank) for of_rank in given])
            errors = given - sent
            weight -= sent.sum(0)
        np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=0, atol=1e-12)
    of_stage = [m for m in trainer.plan.messages(0, False, False, True) if m.codec]
    assert [m.bytes for m in of_stage] == [8 + 16 * 16] * (comm.size > 1)


def test_a_momentum_that_no_codec_applies_is_refused(comm):
    """Oracle: the error, before any training."""

    @dataclass(frozen=True, kw_only=True, repr=False)
    class SignWithMomentum(Sign):
        name: ClassVar[str] = "sign-with-momentum"
        momentum: ClassVar[float] = 0.9

    model = nn.Linear(*SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = Strategy(compression=Compression(gradients=SignWithMomentum()))
    with pytest.raises(ValueError, match=r"momentum=0\.9, but its codec delays no values"):
        FirstOrderTrainer(model, optimizer, comm, strategy=strategy)
