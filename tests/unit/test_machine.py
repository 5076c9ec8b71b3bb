from __future__ import annotations

import dataclasses
import json
import re

import pytest

import mpikfac
from mpikfac.predict import Level, Machine, Network, Sample
from mpikfac.predict.machine import fitted, interpolated, machine_from_json

MACHINE = Machine(
    name="made up",
    inside=Level(1e-6, 1e9),
    between=Level(1e-5, 1e8),
    ranks_per_node=4,
    networks=(Network("resnet20", 32, 1.0, 2.0, 0.5, 0.1, 0.2, 0.3),),
    decompositions={"inverse": ((10.0, 1e-3), (100.0, 1e-1)), "eigen": ((10.0, 1e-2),)},
    products=((64.0, 1e9),),
    samples=(Sample("Allreduce", 2, 1, 1, ((1e3, 1e-5), (1e6, 1e-3))),),
    sources={"inside": "nowhere"},
)


def test_json_there_and_back():
    assert machine_from_json(MACHINE.to_json()) == MACHINE


@pytest.mark.parametrize("line", [Level(2e-5, 3e9), Level(1e-3, 1e6)])
def test_a_fit_finds_the_line_that_points_lie_on(line):
    """Oracle: latency and bandwidth of the line."""
    points = [(2.0**k, line.latency + 2.0**k / line.bandwidth) for k in range(4, 28, 3)]
    found = fitted(points)
    assert found.latency == pytest.approx(line.latency)
    assert found.bandwidth == pytest.approx(line.bandwidth)


def test_a_fit_of_noise_has_no_negative_terms():
    """Oracle: a latency below zero would be the best line through the first points."""
    for points in ([(1e3, 1e-6), (1e4, 1e-4), (1e5, 1e-3)], [(1e3, 2e-3), (1e6, 1e-3)]):
        found = fitted(points)
        assert found.latency > 0 and found.bandwidth > 0


def test_between_points_a_power_law_is_met_exactly():
    """Oracle: x^2, straight in logarithms; constant beyond the ends."""
    points = [(1.0, 1.0), (100.0, 1e4)]
    assert interpolated(points, 7) == pytest.approx(49)
    assert [interpolated(points, x) for x in (0.1, 1000)] == pytest.approx([1, 1e4])


def test_decompositions_grow_with_the_cube_past_the_largest_order():
    """Oracle: the points by hand."""
    assert MACHINE.decomposition("inverse", 100) == pytest.approx(0.1)
    assert MACHINE.decomposition("inverse", 200) == pytest.approx(0.8)
    assert MACHINE.decomposition("eigen", 5) == pytest.approx(1e-2)


def test_times_of_another_batch_are_in_proportion():
    """Oracle: the times that depend on the batch, by hand."""
    network = MACHINE.network("resnet20", 64)
    assert (network.forward, network.backward, network.statistics) == (2.0, 4.0, 1.0)
    assert (network.gradients, network.optimizer, network.precondition) == (0.1, 0.2, 0.3)


def test_times_between_two_batches_lie_on_a_line():
    """Oracle: the middle between two measured batches, and proportions beyond, by hand."""
    measured = MACHINE.network("resnet20", 32)
    larger = dataclasses.replace(
        measured, batch=96, forward=2 * measured.forward, vector_precondition=None
    )
    machine = dataclasses.replace(MACHINE, networks=(larger, measured))
    middle = machine.network("resnet20", 64)
    assert middle.forward == pytest.approx(1.5 * measured.forward)
    assert middle.backward == pytest.approx(measured.backward)
    assert middle.vector_precondition is None
    beyond = machine.network("resnet20", 192)
    assert beyond.forward == pytest.approx(4 * measured.forward)
    assert beyond.optimizer == pytest.approx(measured.optimizer)


@pytest.mark.parametrize("name", mpikfac.predict.published_machines())
def test_published_machines_name_the_source_of_every_number(name):
    """Oracle: all keys of the file with numbers."""
    machine = mpikfac.predict.load_machine(name)
    keys = {f"networks.{f.name}" for f in dataclasses.fields(Network)} - {
        *("networks.model", "networks.batch", "networks.precondition"),
        *("networks.vector_statistics", "networks.vector_precondition"),
    }
    keys |= {f"{level}.{part}" for level in ("inside", "between") for part in Level.__annotations__}
    keys |= {f"decompositions.{preconditioner}" for preconditioner in machine.decompositions}
    assert set(machine.sources) == keys | {"products", "ranks_per_node"}
    assert all(len(source) > 10 for source in machine.sources.values())
    assert machine.between and all(network.precondition is None for network in machine.networks)
    assert not machine.samples


BARE = {"model": "a", "batch": 1} | dict.fromkeys(
    ("forward", "backward", "statistics", "gradients", "optimizer"), 1.0
)
SAMPLE = {"primitive": "Bcast", "ranks": 2, "nodes": 1, "sharing": 1, "points": [[1, 1]]}


def changed(**values):
    return json.dumps(json.loads(MACHINE.to_json()) | values)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "the file is [], not an object of keys and values"),
        (changed(speed=1), "the file has the unknown key 'speed'; known keys are name, inside"),
        ('{"name": "a"}', "the file lacks the key 'inside'"),
        (changed(inside={"latency": 1}), "inside lacks the key 'bandwidth'"),
        (changed(inside={"latency": 1, "bandwidth": 0}), "inside.bandwidth=0 must be a finite"),
        (changed(between={"latency": "1", "bandwidth": 1}), "between.latency='1' must be a finite"),
        (changed(ranks_per_node=0), "ranks_per_node=0 must be a whole number >= 1"),
        (changed(products=[[1]]), "products must be a list of pairs of numbers"),
        (
            changed(products=[], networks=[BARE]),
            "the entry for model='a' in networks lacks 'precondition'",
        ),
        (changed(library="MyMPI"), "library='MyMPI' must be one of Open MPI, MPICH"),
        (changed(hidden=2), "hidden=2 must be a number from -10 to 1"),
        (changed(networks=None), "networks is None, not a list"),
        (changed(networks=[BARE | {"batch": 0}]), "networks.batch=0 must be a whole number"),
        (
            changed(decompositions=[]),
            "decompositions is [], not an object with preconditioners as keys",
        ),
        (changed(between=None), "ranks_per_node=4 and between=None belong together"),
        (changed(samples=[SAMPLE | {"ranks": "4"}]), "samples.ranks='4' must be a whole number"),
        (changed(samples=[SAMPLE | {"primitive": "AllReduce"}]), "must be one of Allreduce, "),
        (changed(products=[[2, 1], [1, 1]]), "ascending first numbers"),
        (changed(decompositions={"eigen": [[1, -1]]}), "decompositions.eigen must be pairs"),
        (changed(networks=[{"model": "a"}]), "networks lacks the key 'batch'"),
    ],
)
def test_what_is_no_machine_is_refused_with_the_reason(text, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        machine_from_json(text)


def test_a_bad_number_of_a_network_is_named():
    text = MACHINE.to_json().replace('"forward": 1.0', '"forward": NaN')
    with pytest.raises(ValueError, match=r"networks.forward=nan must be a finite number"):
        machine_from_json(text)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (
            lambda: mpikfac.predict.load_machine("nowhere"),
            "machine=nowhere is not a readable file",
        ),
        (
            lambda: MACHINE.network("resnet50", 32),
            "no times for model='resnet50', only for: resnet20",
        ),
        (
            lambda: MACHINE.decomposition("svd", 3),
            "no times for preconditioner='svd', only for: inverse",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(ask, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        ask()


def test_a_file_of_the_user_is_read(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.to_json())
    assert mpikfac.predict.load_machine(str(path)) == MACHINE
    path.write_text("x")
    with pytest.raises(ValueError, match=f"machine={path}: line 1 is not JSON"):
        mpikfac.predict.load_machine(str(path))
