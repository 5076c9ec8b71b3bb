"""Leading eigenvectors by iteration, checks of how well they fit, and rejected uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, Compression, Int8, LayerShape, MemOpt, Refresh, Strategy, make_plan
from mpikfac.numerics import eigenbases, triangles
from mpikfac.preconditioners import PRECONDITIONERS, decomposed, named_preconditioner
from support import inside, problem


def spectrum(values, dtype=torch.float64):
    """Return a matrix with the given eigenvalues, and the eigenvectors in the values' order."""
    own = torch.Generator().manual_seed(1)
    rows = torch.randn(len(values), len(values), generator=own, dtype=torch.float64)
    basis = torch.linalg.qr(rows).Q
    product = basis * values @ basis.T
    return ((product + product.T) / 2).to(dtype), basis


def decaying(order, power):
    return torch.arange(1, order + 1, dtype=torch.float64).pow(-power)


def directions(factor, bases, gradient, damping):
    """Return the directions for a single factor; the second factor is the identity."""
    values, vectors = bases
    denominators = torch.empty(len(gradient), len(values)).to(factor)
    eigenbases.damped_denominators([values], [], damping, denominators)
    return eigenbases.precondition(gradient.to(factor), [vectors], [], denominators)


def truncated(factor, rank):
    """Return leading values and vectors, cut off from all values and vectors, in float64."""
    values, vectors = torch.linalg.eigh(factor.double())
    rest = values[:-rank].mean().reshape(1)
    return torch.cat([rest, values[-rank:]]), vectors[:, -rank:].contiguous()


@pytest.mark.parametrize("damping", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_iterating_adds_little_to_what_low_rank_leaves_off(power, dtype, damping):
    """Oracle: directions of the whole factor and of LAPACK's eigenvectors, cut off, in float64."""
    factor, _ = spectrum(decaying(400, power), dtype)
    exact = factor.double()
    gradient = torch.randn(5, 400, generator=torch.Generator().manual_seed(2)).double() @ exact
    assert eigenbases._by_iteration(factor, 50) is not None
    found = directions(factor, eigenbases.leading_eigenbasis(factor, 50), gradient, damping)
    cut_off = directions(exact, truncated(factor, 50), gradient, damping)
    whole = gradient @ torch.linalg.inv(exact + damping * torch.eye(400))
    assert (found.double() - whole).norm() < 1.1 * (cut_off - whole).norm()
    assert (found.double() - cut_off).norm() < 0.6 * (cut_off - whole).norm()


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_iterated_eigenvectors_are_orthonormal_and_keep_the_trace(dtype, rounding):
    """Oracle: the identity, and the factor's trace; the number of iterations affects neither."""
    factor, _ = spectrum(decaying(400, 1.0), dtype)
    assert eigenbases._by_iteration(factor, 50) is not None
    values, vectors = eigenbases.leading_eigenbasis(factor, 50)
    trace = 350 * values[0] + values[1:].sum()
    torch.testing.assert_close(trace, factor.trace(), rtol=rounding, atol=0)
    own = vectors.T @ vectors
    torch.testing.assert_close(own, torch.eye(50).to(own), rtol=0, atol=rounding)


@pytest.mark.parametrize("rank", [20, 100])
def test_what_is_exactly_of_low_rank_is_found_by_iteration(rank):
    """Oracle: the factor, with 20 large eigenvalues above a multiple of the identity."""
    factor, _ = spectrum(torch.cat([torch.linspace(1, 2, 20), torch.full((380,), 1e-3)]).double())
    (rest, *values), vectors = eigenbases.leading_eigenbasis(factor, rank)
    found = vectors * (torch.stack(values) - rest) @ vectors.T + rest * torch.eye(400).double()
    assert eigenbases._by_iteration(factor, rank) is not None
    torch.testing.assert_close(found, factor, rtol=0, atol=1e-12)


def test_where_no_few_eigenvectors_lead_all_are_made():
    """Oracle: LAPACK's eigenvectors, bit by bit, of a spectrum without decay."""
    factor, _ = spectrum(torch.linspace(1, 2, 300).double())
    assert eigenbases._by_iteration(factor, 30) is None
    values, vectors = eigenbases.leading_eigenbasis(factor, 30)
    expected = torch.linalg.eigh(factor)
    assert torch.equal(values[1:], expected[0][-30:])
    assert torch.equal(vectors, expected[1][:, -30:])


def test_an_iteration_is_the_same_every_time_and_leaves_torchs_generator_alone():
    """Oracle: the first result, to the last bit, and torch's next number."""
    factor, _ = spectrum(decaying(200, 1.0))
    torch.manual_seed(3)
    following = torch.rand(1)
    torch.manual_seed(3)
    first = eigenbases.leading_eigenbasis(factor, 20)
    assert torch.equal(torch.rand(1), following)
    torch.manual_seed(4)
    for one, other in zip(first, eigenbases.leading_eigenbasis(factor, 20)):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("order", "rank"), [(8, 5), (8, 2), (300, 20)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_neither_decomposed_nor_fits(order, rank, bad):
    """Oracle: NaN in all blocks, and a misfit beyond every tolerance."""
    factor = torch.eye(order)
    factor[1, 1] = bad
    assert not eigenbases.values_in_basis(factor, torch.eye(order)[:, :rank])[1] <= 1e9
    layer = LayerShape("0", order, order, rank=rank)
    shape = make_plan([layer], 1, Strategy(MemOpt()), preconditioner="eigen").factors["0.A"]
    packed = torch.zeros(shape.packed)
    triangles.add_triangle(packed, factor)
    made = decomposed(shape, PRECONDITIONERS["eigen"], packed)
    assert made["0.A.vectors"].shape == shape.part(2)
    assert made["0.A.values"].shape == shape.part(1)
    assert all(block.isnan().all() for block in made.values())


@pytest.mark.parametrize("rank", [3, 30])
def test_leading_eigenvectors_fit_until_one_outside_has_grown(rank):
    """Oracle: by hand: 0 for own eigenvectors; else the largest value outside minus the least kept.

    The values are values of the changed factor, and keep the changed factor's trace.
    """
    values = torch.cat([torch.linspace(2, 1, rank), torch.full((100,), 0.1)]).double()
    factor, basis = spectrum(values)
    vectors = basis[:, :rank].contiguous()
    own, misfit = eigenbases.values_in_basis(factor, vectors)
    torch.testing.assert_close(own, torch.cat([torch.tensor([0.1]).double(), values[:rank]]))
    assert misfit < 1e-12
    grown = values.clone()
    grown[-1] = 1.5
    factor = basis * grown @ basis.T
    own, misfit = eigenbases.values_in_basis(factor, vectors)
    assert misfit == pytest.approx(0.5 / grown.norm().item(), rel=1e-4)
    torch.testing.assert_close(100 * own[0] + own[1:].sum(), grown.sum())


def test_nothing_has_grown_where_there_is_nothing_outside():
    """Oracle: zero except for rounding; directions of rounding must not count as growth either."""
    factor, basis = spectrum(torch.cat([torch.linspace(2, 1, 10), torch.zeros(390)]), torch.float32)
    vectors = basis[:, :10].float().contiguous()
    assert eigenbases.values_in_basis(factor, vectors)[1] < 1e-5


def test_leading_eigenvectors_of_a_turned_factor_do_not_fit():
    """Oracle: diag(3, 1, 0, 0) seen from a vector turned by an angle, by hand."""
    angle = torch.tensor(0.1, dtype=torch.float64)
    vector = torch.stack([angle.cos(), angle.sin(), *torch.zeros(2).double()])[:, None]
    factor = torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    (rest, value), misfit = eigenbases.values_in_basis(factor, vector)
    expected = 3 * angle.cos() ** 2 + angle.sin() ** 2
    assert (value, rest) == (
        pytest.approx(expected.item()),
        pytest.approx((4 - expected).item() / 3),
    )
    off = 2 * angle.sin() * angle.cos()
    assert misfit == pytest.approx(off.item() / 10**0.5)


def rule(rank, **forms):
    return lambda layer: replace(mpikfac.default_rule(layer), rank=rank, **forms)


def trainer(comm, rank=None, delay=0, tolerance=0.0, **settings):
    model = problem.network()
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=delay, tolerance=tolerance))
    choices = problem.SETTINGS | {"rule": rule(rank)} | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy, **choices)


@pytest.mark.parametrize("relative", [False, True])
def test_a_rank_that_no_factor_exceeds_changes_no_bit(comm, relative):
    """Oracle: the run without a rank."""
    whole, kept = (trainer(comm, r, relative_damping=relative) for r in (None, 10_000))
    assert torch.equal(problem.run(kept, comm), problem.run(whole, comm))
    assert kept.plan.of(0).layouts.bases == whole.plan.of(0).layouts.bases


@pytest.mark.parametrize("tolerance", [0.0, 0.3])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_run_of_low_rank_goes_on_to_the_last_bit(comm, delay, tolerance):
    """Oracle: the uninterrupted run; with a delay, a decomposition is pending."""
    first, second = (trainer(comm, 3, delay, tolerance) for _ in range(2))
    problem.run(first, comm, range(4))
    state = first.state_dict()
    assert ("kfac/due" in state) == (delay > 0)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)


def test_a_state_of_another_rank_is_refused(comm):
    """Oracle: an error that names both shapes; nothing is loaded."""
    first, second = trainer(comm, 3), trainer(comm, 4)
    problem.run(first, comm, range(2))
    before = problem.state(second.model)
    with pytest.raises(mpikfac.UserError, match=r"must be float64 \[\d+, 4\]; it is .*, 3\]"):
        second.load_state_dict(first.state_dict())
    assert torch.equal(problem.state(second.model), before)


def test_vectors_that_are_rounded_are_refused(comm):
    """Oracle: a single line with name, value and remedy; factors may be rounded."""
    layer = LayerShape("l", 8, 8, rank=2)
    with pytest.raises(
        ValueError, match="rank=2 of layer 'l' needs compression.inverses=None, not 'int8'"
    ):
        make_plan(
            [layer],
            2,
            Strategy(CommOpt(), compression=Compression(inverses=Int8())),
            preconditioner="eigen",
        )
    make_plan(
        [layer],
        2,
        Strategy(CommOpt(), compression=Compression(factors=Int8())),
        preconditioner="eigen",
    )
    rounded = {"preconditioner": mpikfac.Eigen(dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="rank=3 of layer '0' needs preconditioner.dtype=None, "):
        trainer(comm, 3, **rounded)


def test_within_blocks_each_keeps_its_own(comm):
    """Oracle: by hand: the decomposed blocks' shapes; a block below the rank is whole."""
    kfac = trainer(comm, rule=rule(3, largest=5))
    problem.run(kfac, comm, [0])
    for name, factor in kfac.plan.factors.items():
        vectors = inside.bases(kfac)[f"{name}.vectors"]
        assert vectors.shape == (factor.order, min(3, factor.order))
        assert len(inside.bases(kfac)[f"{name}.values"]) == min(4, factor.order)


@pytest.mark.parametrize("preconditioner", ["inverse", problem.UNSPLIT, "eva"])
def test_other_preconditioners_keep_no_eigenvectors(preconditioner):
    """Oracle: a single line with name, value and remedy."""
    name = named_preconditioner(preconditioner).form.name
    with pytest.raises(ValueError, match=f"rank=2 of layer 'l' .*, not '{name}'"):
        make_plan(
            [LayerShape("l", 8, 8, rank=2)], 1, Strategy(MemOpt()), preconditioner=preconditioner
        )


@pytest.mark.parametrize("rank", [0, -1])
def test_no_eigenvector_at_all_is_refused(rank):
    """Oracle: a single line with name, value and remedy."""
    with pytest.raises(ValueError, match=f"rank={rank} of layer 'l' must be at least 1, or None"):
        make_plan([LayerShape("l", 8, 8, rank=rank)], 1, Strategy(MemOpt()), preconditioner="eigen")


def test_bytes_and_products_shrink_with_the_rank():
    """Oracle: by hand, for factors of orders 64 and 32 with 4 kept eigenvectors."""
    layer = LayerShape("l", 64, 32, rank=4)
    plan = make_plan([layer], 1, Strategy(MemOpt()), preconditioner="eigen")
    assert plan.of(0).layouts.bases.shapes == {
        "l.A.vectors": (64, 4),
        "l.A.values": (5,),
        "l.G.vectors": (32, 4),
        "l.G.values": (5,),
    }
    assert plan.of(0).layouts.denominators.shapes == {"l": (5, 5)}
    assert layer.products() == [(32 + 4) * 64 * 4, 64 * 32 * 4]
    assert [factor.work() for factor in layer.factors] == [2 * 64**2 * 4, 2 * 32**2 * 4]
    assert [factor.work(2) for factor in layer.factors] == [64**2, 32**2]
