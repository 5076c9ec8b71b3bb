"""Gradients for labels drawn by the model, compared with Hessians and expectations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpikfac.numerics import fisher

LOSSES = {
    "cross-entropy": lambda f: F.cross_entropy(f, torch.zeros(len(f), *f.shape[2:]).long()),
    "squared-error": lambda f: F.mse_loss(f, torch.zeros_like(f)),
    "logistic": lambda f: F.binary_cross_entropy_with_logits(f, torch.zeros_like(f)),
}


def outputs(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def hessians(f, loss):
    """Return the Hessian of every example's part of the mean loss, by autograd `[batch, n, n]`."""
    found = torch.autograd.functional.hessian(LOSSES[loss], f).flatten(1, f.dim() - 1)
    n = f[0].numel()
    found = found.flatten(2).view(len(f), n, len(f), n)
    return torch.stack([found[b, :, b] for b in range(len(f))])


@pytest.mark.parametrize("loss", fisher.LOSSES)
def test_all_labels_give_the_hessian(loss):
    """Oracle: autograd's Hessian of the mean loss, `batch` times the Hessian of a single part."""
    f = outputs(3, 4)
    vectors = torch.stack(list(fisher.exact(f, loss)), 2)
    found = len(f) * vectors @ vectors.mT
    torch.testing.assert_close(found, hessians(f, loss))


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 2)])
@pytest.mark.parametrize("loss", fisher.LOSSES)
def test_drawn_labels_give_the_hessian_on_average(loss, shape):
    """Oracle: autograd's Hessian, within six standard errors of 20,000 draws; the mean is 0."""
    f = outputs(*shape)
    draws = torch.stack([fisher.sampled(f, loss).flatten(1) for _ in range(20000)])
    products = len(f) * torch.einsum("kbi,kbj->kbij", draws, draws)
    if len(shape) == 3:  # two positions' products count for themselves only
        positions = torch.arange(f[0].numel()) % shape[2]
        products *= (positions == positions[:, None]).double()
    errors = products.std(0) / 20000**0.5 + 1e-12
    assert ((products.mean(0) - hessians(f, loss)).abs() < 6 * errors).all()
    assert (draws.mean(0).abs() < 6 * draws.std(0) / 20000**0.5).all()


def test_variances_of_confident_bits_are_not_rounded_away():
    """Oracle: `p (1 - p)` in float64; in float32, `1 - p` of these outputs is 0 or 1."""
    f = torch.tensor([[-30.0, 30.0]])
    found = torch.stack(list(fisher.exact(f, "logistic")), 2)[0].diagonal().square()
    p = torch.tensor([-30.0]).double().sigmoid()
    torch.testing.assert_close(found.double(), (p * (1 - p) / 2).expand(2), rtol=1e-5, atol=0)


def test_all_labels_of_many_positions_are_refused():
    with pytest.raises(ValueError, match=r"not \[2, 3, 4\]; use .*fisher_type='mc'"):
        next(fisher.exact(outputs(2, 3, 4), "cross-entropy"))
