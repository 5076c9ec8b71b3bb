"""Adam's steps for many gradients at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpikfac.numerics import AdamSteps, Arena
from mpikfac.plan import count_of, lay_out

# With a gap in the arena.
SHAPES = {"a": (3, 5), "b": (16,), "c": (7, 11), "gap": (4,), "d": (2, 3), "e": (1,)}
NAMES = [name for name in SHAPES if name != "gap"]


class Calls(TorchDispatchMode):
    """Count calls of torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def arena(shapes):
    return Arena(lay_out([list(shapes.items())]), torch.float64, torch.device("cpu"))


def steps_by_torch(gradients, left_out):
    """Return the steps of torch's Adam without momentum, `[steps]` by name; None if left out."""
    found = {name: [] for name in NAMES}
    for name in NAMES:
        weight = torch.zeros(SHAPES[name]).double()
        optimizer = torch.optim.Adam([weight], lr=1.0, betas=(0.0, 0.999))
        for step, now in enumerate(gradients):
            before = weight.clone()
            weight.grad = None if name in left_out[step] else now[name]
            optimizer.step()
            found[name].append(None if name in left_out[step] else before - weight)
    return found


@pytest.mark.parametrize("left_out", [[()] * 4, [(), ("c", "d"), (), ("d", "elsewhere")]])
def test_steps_are_adams(left_out):
    """Oracle: torch's Adam, parameter by parameter; a gradient that is left out counts nowhere."""
    torch.manual_seed(0)
    batches = [{name: torch.randn(SHAPES[name]).double() for name in NAMES} for _ in left_out]
    expected = steps_by_torch(batches, left_out)
    gradients = arena(SHAPES)
    adam = AdamSteps(gradients, NAMES)
    for step, batch in enumerate(batches):
        for name in NAMES:
            broken = name in left_out[step]
            gradients[name].copy_(batch[name].fill_(math.nan) if broken else batch[name])
        adam.count(left_out[step])
        taken = dict(zip(NAMES, adam.take()))
        for name in set(NAMES).difference(left_out[step]):
            torch.testing.assert_close(taken[name], expected[name][step])


def test_the_state_has_an_average_and_a_weight_for_every_name():
    """Oracle: names and shapes of saved states; the sum of weights is `1 - 0.999^steps`."""
    gradients = arena(SHAPES)
    steps = AdamSteps(gradients, NAMES)
    shapes = {name: tuple(tensor.shape) for name, tensor in steps.items()}
    counts = {count_of(name): (1,) for name in NAMES}
    assert shapes == {name: SHAPES[name] for name in NAMES} | counts
    for _ in range(3):
        steps.count(())
    for name in counts:
        assert steps[name].item() == pytest.approx(1 - 0.999**3)


def test_many_gradients_take_the_calls_of_two():
    """Oracle: the count for two gradients."""
    counts = []
    for names in (["0", "1"], [str(number) for number in range(50)]):
        steps = AdamSteps(arena(dict.fromkeys(names, (5, 3))), names)
        steps.count(())
        steps.take()
        with Calls() as calls:
            steps.count(())
            steps.take()
        counts.append(calls.count)
    assert counts[0] == counts[1]
