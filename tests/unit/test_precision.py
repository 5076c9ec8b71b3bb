"""The precision of directions: how and where operands are rounded, and the effect on a step."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import AdamGrafting, MemOpt, NoGrafting, Refresh, Strategy
from mpikfac.numerics import multiplying, orthogonalised, product, products, usual_precision
from support import inside, problem

DEVICE = problem.DEVICE
SHAPES = [((5, 300), (300, 7)), ((3, 5, 300), (3, 300, 7)), ((2, 3, 5, 9), (2, 3, 9, 4))]
NVIDIA = DEVICE.type == "cuda" and torch.version.cuda is not None


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# -- rounding ---------------------------------------------------------


def nearest(x, bits):
    """Return float32 numbers rounded to so many bits of mantissa, ties away from zero."""
    exact = x.astype(np.float64)
    exponents = np.maximum(np.frexp(exact)[1] - 1, -126)  # subnormal numbers have the least
    quanta = np.ldexp(1.0, exponents - bits)
    return np.copysign(np.floor(np.abs(exact) / quanta + 0.5) * quanta, exact)


def numbers():
    """Return float32 numbers of all sizes, and numbers between two of TF32 and of bfloat16."""
    drawn = np.random.default_rng(0)
    exponents = drawn.integers(-140, 126, 10_000)
    spread = np.ldexp(drawn.uniform(1, 2, 10_000), exponents) * drawn.choice([-1, 1], 10_000)
    ties = [
        sign * (1 + (2 * k + 1) * 2.0**-b) for k in range(9) for b in (8, 11) for sign in (1, -1)
    ]
    return np.array([0.0, -0.0, *ties, *spread], np.float32)


def test_rounding_to_tf32_is_to_the_nearest():
    """Oracle: arithmetic in float64 by exponents, without bits."""
    x = numbers()
    rounded = products.rounded_to_tf32(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(rounded, nearest(x, 10))
    assert np.array_equal(np.signbit(rounded), np.signbit(x))


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001])
def test_rounding_to_tf32_keeps_infinity_and_every_nan(bits):
    """Oracle: the number, also a NaN whose bits end with ones."""
    x = torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
    rounded = products.rounded_to_tf32(x)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded.isinf(), x.isinf())
    assert torch.equal(rounded.signbit(), x.signbit())


# -- products ---------------------------------------------------------


def operands(shapes, dtype=torch.float32):
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]


def in_bits(x, precision):
    """Return an operand in float64, rounded as the precision says."""
    if precision == "tf32":
        return torch.from_numpy(nearest(x.cpu().numpy(), 10))
    if precision == "bfloat16":  # ties to even: the lowest kept bit decides
        bits = x.cpu().numpy().view(np.uint32)
        kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
        return torch.from_numpy(kept.view(np.float32)).double()
    return x.cpu().double()


@pytest.mark.parametrize("precision", products.PRECISIONS)
@pytest.mark.parametrize("shapes", SHAPES, ids=["matrices", "a stack", "stacks"])
def test_a_product_is_of_rounded_operands_with_sums_in_float32(precision, shapes):
    """Oracle: the product in float64 of operands rounded by numpy; each sum within 2^-20 of it."""
    a, b = operands(shapes)
    with multiplying(precision):
        found = product(a, b)
    assert found.dtype == torch.float32
    left, right = in_bits(a, precision), in_bits(b, precision)
    bound = 2.0**-20 * (left.abs() @ right.abs())
    assert ((found.cpu().double() - left @ right).abs() <= bound).all()
    if precision != "float32":
        assert ((found.cpu().double() - a.cpu().double() @ b.cpu().double()).abs() > bound).any()


@pytest.mark.parametrize("shapes", [*SHAPES, ((300, 512), (512, 256))])
def test_float32_keeps_the_bits(shapes):
    """Oracle: the product outside of any region; of small matrices, torch's product."""
    a, b = operands(shapes)
    with multiplying("float32"):
        found = product(a, b)
    assert torch.equal(found, product(a, b))
    if shapes in SHAPES:
        assert torch.equal(found, a @ b)


@pytest.mark.parametrize("precision", products.PRECISIONS)
def test_products_of_float64_stay_in_float64(precision):
    """Oracle: torch's product, to the last bit."""
    a, b = operands(SHAPES[0], torch.float64)
    with multiplying(precision):
        assert torch.equal(product(a, b), a @ b)


def test_operands_in_bfloat16_are_exact_in_bfloat16():
    """Oracle: the product in float64; decompositions kept in bfloat16 are rounded no more."""
    a, b = operands(SHAPES[0], torch.bfloat16)
    with multiplying("bfloat16"):
        found = product(a, b).cpu()
    torch.testing.assert_close(found, (a.cpu().double() @ b.cpu().double()).float())
    with multiplying("tf32"):
        assert torch.equal(product(a, b), a @ b)


def test_a_precision_ends_with_its_region():
    """Oracle: the product outside of the region, after an error, inside of a region, beside it."""
    a, b = operands(SHAPES[0])
    usual = product(a, b)
    with pytest.raises(ZeroDivisionError), multiplying("bfloat16"):
        raise ZeroDivisionError
    assert torch.equal(product(a, b), usual)
    beside = []
    with multiplying("bfloat16"):
        coarse = product(a, b)
        with multiplying("float32"):
            assert torch.equal(product(a, b), usual)
        assert torch.equal(product(a, b), coarse) and not torch.equal(coarse, usual)
        thread = threading.Thread(target=lambda: beside.append(product(a, b)))
        thread.start()
        thread.join()
    assert torch.equal(beside[0], usual)


# -- tensor cores, without a GPU ---------------------------------------------------------


class Matrix:
    """A matrix that tells torch's setting when it is multiplied."""

    dtype, is_cuda = torch.float32, True

    def __init__(self, broken=False):
        self.broken = broken

    @classmethod
    def __torch_function__(cls, func, types, args, kwargs):
        assert func is torch.matmul
        if args[1].broken:
            raise ZeroDivisionError
        return torch.backends.cuda.matmul.fp32_precision


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_torch_multiplies_in_tf32_for_one_product_alone(monkeypatch, before):
    """Oracle: torch's setting in the product, between products, and after an error."""
    settings = torch.backends.cuda.matmul
    usual = settings.fp32_precision
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    settings.fp32_precision = before
    try:
        with multiplying("tf32"):
            assert settings.fp32_precision == before
            assert product(Matrix(), Matrix()) == "tf32"
            assert settings.fp32_precision == before
            with pytest.raises(ZeroDivisionError):
                product(Matrix(), Matrix(broken=True))
            assert settings.fp32_precision == before
    finally:
        settings.fp32_precision = usual


@pytest.mark.parametrize("shapes", SHAPES, ids=["matrices", "a stack", "stacks"])
def test_torch_has_products_of_bfloat16_with_float32(monkeypatch, shapes):
    """Oracle: torch's own shapes and dtypes of the product, on its device without numbers."""
    monkeypatch.setattr(products, "_has_tensor_cores", lambda tensor: True)
    a, b = (torch.empty(shape, device="meta") for shape in shapes)
    with multiplying("bfloat16"):
        found = product(a, b)
    assert (found.shape, found.dtype) == ((a @ b).shape, torch.float32)


def test_the_usual_precision_is_the_devices(monkeypatch):
    """Oracle: by hand."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for version, of_gpu in ((None, "float32"), ("13.0", "tf32")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert usual_precision(cpu, False) == "float32"
        assert usual_precision(gpu, False) == of_gpu
        assert usual_precision(gpu, True) == "float32"


# -- steps ---------------------------------------------------------


def directions(comm, precision, dtype=torch.float32, **settings):
    """Return the directions of a step, one after the other, in float64."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8)]
    model = nn.Sequential(*layers).to(DEVICE, dtype)
    x, y = (torch.randn(64, width).to(DEVICE, dtype) for width in (40, 8))
    settings = {"damping": 0.1, "relative_damping": True, "matmul_precision": precision, **settings}
    kfac = problem.kfac(model, problem.sgd_all(model), comm, **settings)
    (model(x) - y).square().mean().backward()
    kfac.step()
    return torch.cat([one.flatten().cpu().double() for one in inside.directions(kfac).values()])


@pytest.mark.parametrize("grafting", [NoGrafting(), AdamGrafting()], ids=problem.label)
@pytest.mark.parametrize("preconditioner", ["inverse", "eigen"])
def test_a_step_rounds_as_its_precision_says(comm, preconditioner, grafting):
    """Oracle: the step in float64, and the size of the last kept bit."""
    settings = {"preconditioner": preconditioner, "grafting": grafting}
    exact = directions(comm, None, torch.float64, **settings)
    errors = {}
    for precision in products.PRECISIONS:
        found = directions(comm, precision, **settings)
        errors[precision] = ((found - exact).norm() / exact.norm()).item()
    assert errors["float32"] < 1e-4 < errors["tf32"] < 3e-2
    assert 1.5 * errors["tf32"] < errors["bfloat16"] < 0.3
    if not NVIDIA:
        assert torch.equal(
            directions(comm, None, **settings), directions(comm, "float32", **settings)
        )


def test_a_step_in_float64_has_no_precision(comm):
    """Oracle: the step without a choice, to the last bit."""
    usual = directions(comm, None, torch.float64)
    for precision in products.PRECISIONS:
        assert torch.equal(directions(comm, precision, torch.float64), usual)


@pytest.mark.parametrize("precision", ["fp32", "float16", torch.bfloat16, True])
def test_an_unknown_precision_is_refused(comm, precision):
    text = f"matmul_precision={precision!r} must be one of None, 'float32', 'tf32', 'bfloat16'"
    with pytest.raises(ValueError, match=re.escape(text)):
        directions(comm, precision)


def test_precision_beside_a_thread_that_decomposes_is_refused(comm):
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=1))
    text = "matmul_precision='tf32' needs refresh.staleness=0 or refresh.servers >= 1, not 1 and"
    with pytest.raises(ValueError, match=re.escape(text)):
        directions(comm, "tf32", strategy=strategy)


@pytest.mark.parametrize(("precision", "least"), [("tf32", 0.99), ("bfloat16", 0.8)])
def test_polynomials_round_little_of_a_matrix_of_low_rank(precision, least):
    """Oracle: the polynomials in float64; identities are in no product that rounds."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(n, 8, generator=generator) for n in (64, 576))
    matrix = rows @ columns.T
    (exact,) = orthogonalised([matrix.double()])
    with multiplying(precision):
        (found,) = orthogonalised([matrix])
    assert F.cosine_similarity(found.double().flatten(), exact.flatten(), dim=0) > least
