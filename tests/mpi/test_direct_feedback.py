"""Direct feedback: gradients of blocks by fixed signs, compared with numpy block by block."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import Estimator, FirstOrderTrainer, Strategy
from mpikfac.lab import DirectFeedback
from support import problem
from support.strategies import changed

pytestmark = pytest.mark.lab

RANKS = mpikfac.world().size
PRIME = 2_654_435_761
FORWARD = Estimator(fisher_type="forward-only", subsample=1)


def signs(seed, number, classes, size):
    """Return the signs of a block, over the root of their number for an output."""
    generator = torch.Generator().manual_seed(seed + number * PRIME)
    drawn = torch.randint(
        0, 2, (classes, size), generator=generator, dtype=torch.int8, device="cpu"
    )
    return (2.0 * drawn.double() - 1).numpy() / np.sqrt(size)


def perceptron():
    torch.manual_seed(3)
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(problem.DEVICE)


def test_gradients_of_a_perceptron(comm):
    """Oracle: numpy: `e B` in the place of the errors of both hidden layers."""
    model = perceptron()
    trainer = FirstOrderTrainer(model, problem.plain_sgd(model), comm)
    DirectFeedback(trainer, ["1", "3"], seed=5)
    x, labels = np.random.default_rng(1).normal(size=(9, 6)), np.arange(9) % 4
    on_device = (torch.tensor(part).to(problem.DEVICE) for part in (x, labels))
    inputs, targets = on_device
    F.cross_entropy(model(inputs), targets).backward()
    w = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    first = np.tanh(x @ w["0.weight"].T + w["0.bias"])
    second = np.tanh(first @ w["2.weight"].T + w["2.bias"])
    logits = second @ w["4.weight"].T + w["4.bias"]
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = (share - np.eye(4)[labels]) / 9
    of_first = error @ signs(5, 0, 4, 7) * (1 - first**2)
    of_second = error @ signs(5, 1, 4, 8) * (1 - second**2)
    right = {
        **{"0.weight": of_first.T @ x, "0.bias": of_first.sum(0)},
        **{"2.weight": of_second.T @ first, "2.bias": of_second.sum(0)},
        **{"4.weight": error.T @ second, "4.bias": error.sum(0)},
    }
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.grad.cpu(), right[name], rtol=0, atol=1e-14)


def test_inside_a_block_gradients_come_by_back_propagation(comm):
    """Oracle: autograd block by block, with `e B` as the gradient of a block's output."""
    model = problem.network()
    first, second = copy.deepcopy(model[:3]), copy.deepcopy(model[3:])
    trainer = FirstOrderTrainer(model, problem.plain_sgd(model), comm)
    feedback = DirectFeedback(trainer, ["2"], seed=7)
    images, labels = problem.batch(0)
    with torch.no_grad():
        assert torch.equal(model(images), second(first(images)))
    F.cross_entropy(model(images), labels).backward()
    output = first(images)
    logits = second(output.detach())
    F.cross_entropy(logits, labels).backward()
    error = (logits.softmax(1) - F.one_hot(labels, 5)) / len(labels)
    of_block = error @ torch.tensor(signs(7, 0, 5, output[0].numel())).to(error)
    output.backward(of_block.view_as(output))
    for found, right in zip(model.parameters(), [*first.parameters(), *second.parameters()]):
        torch.testing.assert_close(found.grad, right.grad, rtol=0, atol=1e-13)
    feedback.detach()
    other, model = copy.deepcopy(model), problem.network()
    for each in (other, model):
        each.zero_grad()
        F.cross_entropy(each(images), labels).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(other.parameters(), model.parameters()))


def test_a_copy_of_the_model_has_no_feedback(comm):
    """Oracle: back-propagation, bit for bit."""
    model, right = problem.network(), problem.network()
    DirectFeedback(FirstOrderTrainer(model, problem.plain_sgd(model), comm), ["2"])
    for each in (copied := copy.deepcopy(model), right):
        F.cross_entropy(each(problem.batch(0)[0]), problem.batch(0)[1]).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(copied.parameters(), right.parameters()))


def trained(comm, kfac, choices, steps):
    """Return the state of a model that is trained by direct feedback, and the trainer's state."""
    model = problem.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = changed(Strategy(), choices)
    if kfac:
        trainer = mpikfac.KFAC(
            model, optimizer, comm, strategy, damping=0.1, estimator=FORWARD, inv_update_steps=2
        )
    else:
        trainer = FirstOrderTrainer(model, optimizer, comm, strategy)
    DirectFeedback(trainer, ["2"], seed=1)
    found = problem.run(trainer, comm, steps)
    state = problem.whole_state(trainer, comm)
    trainer.close()
    return found, state


@problem.by_one_process
def by_one_rank(comm, kfac):
    return trained(comm, kfac, {}, range(4))


@pytest.mark.parametrize(
    "choices", [{}, {"transport.fusion": 1, "transport.overlap": True}], ids=str
)
@pytest.mark.parametrize("kfac", [False, True])
def test_ranks_train_as_one_rank(comm, kfac, choices):
    """Oracle: one rank, to rounding; the factors of a forward-only K-FAC, too."""
    found, state = trained(comm, kfac, choices, range(4))
    right, whole = by_one_rank(kfac)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)
    assert state.keys() == whole.keys()
    assert any(name.endswith(".A") for name in state) == kfac
    assert not any(name.endswith(".G") for name in state)


def test_a_rank_without_examples_takes_part(comm):
    """Oracle: gradients of 0, in the shape of the outputs."""
    model = perceptron()
    DirectFeedback(FirstOrderTrainer(model, problem.plain_sgd(model), comm), ["1", "3"])
    outputs = model(torch.zeros(0, 6, dtype=torch.float64, device=problem.DEVICE))
    outputs.sum().backward()
    assert outputs.shape == (0, 4)
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_what_does_not_fit_is_refused_in_a_line(comm):
    """Oracle: the message."""
    model = problem.network()
    kfac = mpikfac.KFAC(model, problem.sgd(model), comm, Strategy())
    with pytest.raises(
        ValueError, match=r"needs Estimator\(fisher_type='forward-only'\), or a preconditioner"
    ):
        DirectFeedback(kfac, ["2"])
    kfac.close()
    trainer = FirstOrderTrainer(model, problem.sgd(model), comm)
    with pytest.raises(ValueError, match="must be a module of the model, not 'relu'"):
        DirectFeedback(trainer, ["relu"])
    trainer.close()
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()
    model.to(problem.DEVICE)
    DirectFeedback(FirstOrderTrainer(model, problem.sgd_all(model), comm), ["1"])
    with pytest.raises(ValueError, match=r"outputs \[batch, classes\], not \[12, 2, 8, 8\]"):
        model(problem.batch(0)[0][:12])
    model = perceptron()
    DirectFeedback(FirstOrderTrainer(model, problem.plain_sgd(model), comm), ["1", "4"])
    with pytest.raises(ValueError, match="the end of the model must not be in ends; remove it"):
        model(torch.zeros(2, 6, dtype=torch.float64, device=problem.DEVICE))
