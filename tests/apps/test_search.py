"""The search of the simulate program: fronts, variants, intervals, and a machine known by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

import mpikfac
from mpikfac.predict import Job, Level, Machine, Network
from mpikfac_apps.lab.predict import search, simulate
from mpikfac_apps.lab.predict.options import SIMULATE
from mpikfac_apps.problems import models

pytestmark = pytest.mark.lab

ASK = ["--search", "--model=resnet50", "--machine=v100-edr"]
TWO_LAYERS = """
import torch

def build():
    layers = [torch.nn.Linear(400, 400, bias=False) for _ in range(2)]
    return torch.nn.Sequential(*layers)
"""


@pytest.mark.parametrize("seed", range(40))
def test_the_front_is_what_no_other_point_is_better_than(seed):
    """Oracle: all pairs of points, of few values, so that many are equal in part."""
    draws = random.Random(seed)
    count, sides, most = draws.randint(0, 30), draws.randint(1, 4), draws.randint(1, 5)
    points = [tuple(draws.randint(0, most) for _ in range(sides)) for _ in range(count)]

    def better(first: int, second: int) -> bool:
        as_good = all(a <= b for a, b in zip(points[first], points[second]))
        return as_good and (points[first] != points[second] or first < second)

    left = {p for p in range(count) if not any(better(other, p) for other in range(count))}
    assert search.front(points) == left


def test_the_first_of_equal_points_stands_for_all():
    """Oracle: by hand."""
    assert search.front([(2, 1), (1, 2), (2, 1), (2, 2), (1, 2)]) == {0, 1}


@pytest.mark.parametrize(
    ("asked", "further"),
    [
        ((10, 100), [(5, 100), (20, 100), (10, 50), (10, 200)]),
        ((10, 50), [(5, 50), (10, 100)]),  # bases at every 25th step would lack new factors
        ((1, 1), [(1, 2)]),
        ((10, 25), [(5, 25), (10, 50)]),  # what is asked for stays, in any case
        ((4, 40, 5), [(2, 40), (8, 40), (4, 20), (4, 80)]),
        ((3, 6, 2), [(3, 12)]),
    ],
)
def test_one_of_both_intervals_is_halved_or_doubled(asked, further):
    """Oracle: by hand; with five turns, a part of the bases is made five times as often."""
    assert search.intervals(*asked) == [asked[:2], *further]


def test_strategies_with_the_numbers_of_one_process_are_searched():
    """Oracle: by hand, from the sentences of `mpikfac strategies`."""
    alike = (
        "kfac-opt kfac-lw comm-opt mem-opt hybrid sharded-optimizer spd-kfac deferred-allreduce "
        "deferred-sharded"
    )
    found = [name for name in ("sgd", "sgd:mem-opt", *mpikfac.plan.NAMED) if search.alike(name)]
    assert found == [*alike.split(), "balanced-shards"]


@pytest.mark.parametrize(
    ("given", "count", "name"),
    [
        ("", 3 * 2 * 3, "hybrid"),
        ("", 2 * 3, "comm-opt"),
        ("--assignment.grad_workers=2", 2 * 3, "hybrid"),
        ("--assignment.grad_worker_fraction=0.5", 2 * 3, "hybrid"),
        ("--transport.ranks_per_node=2", 3, "comm-opt"),
        ("--compression.gradients=int8", 2, "comm-opt"),
    ],
)
def test_a_variant_changes_what_the_options_leave_open(given, count, name):
    """Oracle: by hand: 16 ranks have 2, 4 or 8 workers between the ends, on nodes of 4 ranks."""
    options = SIMULATE.read([*ASK, "--ranks=16", f"--strategy={name}", *given.split()])
    machine = mpikfac.predict.load_machine("v100-edr")
    found = [*search.changes(options, name, 16, machine, search.WIRES)]
    assert len(found) == len({str(one) for one in found}) == count
    assert not any(change.keys() & options.change.keys() for _, change in found)
    alone = replace(machine, between=None)
    assert not any("per_node" in str(one) for one in search.changes(options, name, 16, alone, {}))


def test_costs_are_the_librarys_for_every_interval():
    """Oracle: `mpikfac.predict.simulate` of plans made by the test, with these intervals."""
    machine = mpikfac.predict.load_machine("v100-edr")
    asked = [
        "--ranks=16",
        "--strategy=mem-opt,deferred-sharded",
        "--transport.ranks_per_node=4",
        "--refresh.stagger=2",
    ]
    options = SIMULATE.read([*ASK, *asked, "--factor_update_steps=10", "--inv_update_steps=40"])
    rows = [row for row in search.search(options, machine) if not row["wires"]]
    intervals = {(10, 40), (5, 40), (20, 40), (10, 20), (10, 80)}
    assert {(row["factor_update_steps"], row["inv_update_steps"]) for row in rows} == intervals
    layers, others = models.shapes_of("resnet50")
    for row in rows:
        strategy, _ = mpikfac.get_strategy(row["strategy"])
        strategy = replace(
            strategy,
            refresh=mpikfac.Refresh(stagger=2),
            transport=replace(strategy.transport, ranks_per_node=4),
        )
        plan = mpikfac.make_plan(layers, 16, strategy, others)
        job = Job(
            *("resnet50", 32, row["factor_update_steps"], row["inv_update_steps"]),
            grafting=mpikfac.AdamGrafting(momentum=0.9),
        )
        found = mpikfac.predict.simulate(plan, machine, job)
        costs = found.mean.seconds, found.mean.sent, found.memory
        assert (row["seconds"], row["sent"], row["memory"]) == pytest.approx(costs)
        assert row["asked"] == ((job.factor_update_steps, job.inv_update_steps) == (10, 40))


def test_the_front_of_a_machine_with_free_messages_is_known(tmp_path):
    """Oracle: by hand: two equal layers on two ranks, and messages that take no time.

    MEM-OPT makes one direction on a rank and COMM-OPT makes both, so MEM-OPT is quicker and keeps
    less. MEM-OPT sends directions at every step, and COMM-OPT sends bases at few steps. The ways
    with squares in the place of triangles send more and keep more. A sharded optimizer sends
    factors to one rank alone, gradients and weights as COMM-OPT sends sums, and is the best of all.
    """
    (tmp_path / "own.py").write_text(TWO_LAYERS)
    name = f"{tmp_path / 'own.py'}:build"
    network = Network(name, 4, 0.1, 0.2, 0.1, 0.0, 0.0, precondition=0.5)
    machine = Machine("free", Level(1e-15, 1e18), (network,), {"inverse": ((400.0, 0.5),)})
    asked = ["--model", name, "--machine=none", "--ranks=2", "--batch_per_rank=4", "--search"]
    asked += ["--factor_update_steps=1000", "--inv_update_steps=1000"]
    four, best = "kfac-opt,kfac-lw,comm-opt,mem-opt", {}
    for names in (four, f"{four},sharded-optimizer"):
        found = search.search(SIMULATE.read([*asked, "--strategy", names]), machine)
        best[names] = {row["strategy"] for row in found if row["asked"] and row["best"]}
    assert [*best.values()] == [{"comm-opt", "mem-opt"}, {"sharded-optimizer"}]


def test_the_table_and_the_picture_hold_the_best_choices(tmp_path, capsys):
    """Oracle: the rows of the file in JSON; a star for intervals or wires that nobody asked for."""
    picture, file = tmp_path / "best.svg", tmp_path / "all.json"
    asked = [
        "--ranks=4,16",
        "--strategy=comm-opt,mem-opt,deferred-sharded",
        "--inv_update_steps=20",
    ]
    assert simulate.main([*ASK, *asked, "--picture", str(picture), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    text = capsys.readouterr().out
    for ranks in (4, 16):
        same = [row for row in rows if row["ranks"] == ranks]
        best = [row for row in same if row["best"]]
        head, _, *lines = text.partition(f"{ranks} ranks: ")[2].partition("\n\n")[0].splitlines()
        assert head == f"{len(best)} of {len(same)} choices"
        assert len(lines) == len(best) < len(same)
        for line, row in zip(lines, best):
            name, workers, *_, factors, bases, mean, sent, kept = line.split()
            assert name == row["strategy"] + "*" * (not row["asked"])
            asked_for = (factors, bases, row["wires"]) == ("10", "20", "")
            assert row["asked"] == asked_for and int(workers) == row["workers"]
            assert float(mean) == pytest.approx(1e3 * row["seconds"], abs=0.051)
            sizes = [row["sent"] / 2**20, row["memory"] / 2**20]
            assert [float(sent), float(kept)] == pytest.approx(sizes, abs=0.0051)
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and drawn.count("PathCollection_") == sum(
        row["best"] for row in rows
    )


def test_a_preconditioner_without_factors_has_no_other_intervals():
    """Oracle: by hand: intervals of factors change nothing for Muon."""
    asked = [
        *ASK,
        "--search",
        "--ranks=7,16",
        "--preconditioner=muon",
        "--strategy=hybrid,sharded-optimizer",
    ]
    machine = mpikfac.predict.load_machine("v100-edr")
    rows = search.search(SIMULATE.read(asked), machine)
    assert {row["ranks"]: len({row["factor_update_steps"] for row in rows}) for row in rows} == {
        7: 1,
        16: 1,
    }
    assert {row["strategy"] for row in rows if row["ranks"] == 7} == {"sharded-optimizer"}


def test_fronts_are_those_of_choices_with_the_same_numbers():
    """Oracle: all pairs with the same ranks, intervals and wires, in steps of about 3 %."""
    machine = mpikfac.predict.load_machine("v100-edr")
    options = SIMULATE.read([*ASK, "--ranks=4,16", "--inv_update_steps=100"])
    rows = search.search(options, machine)
    for row in rows:
        same = [r for r in rows if all(r[n] == row[n] for n in ("ranks", *search.TRAINED))]
        beats = [r for r in same if all(r[name] < row[name] / 1.031 for name in search.COST)]
        assert not (row["best"] and beats)
        assert row["best"] or any(
            r["best"] and all(r[name] < 1.031 * row[name] for name in search.COST) for r in same
        )
    assert {row["ranks"] for row in rows} == {4, 16} and math.isfinite(rows[0]["seconds"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--picture=x.svg", "picture=x.svg needs search=true"),
        ("--search --picture=x.txt", "x.txt must end in .pdf, .png or .svg"),
        ("--search --preconditioner=null", "so preconditioner must not be null"),
        ("--search --strategy=dp-kfac,sgd,stale-inverse", "the same results as a single process"),
        ("--search --strategy=hybrid --ranks=7", "hybrid also needs a number of ranks that"),
        ("--search --strategy=spd-kfac --transport.virtual_ranks=4", "virtual_ranks=None, not 4"),
        ("--search --model=resnet20", "only for: resnet101, resnet152, resnet50"),
        ("--search --strategy=kfac-lw --transport.overlap", "overlap=True needs"),
    ],
)
def test_bad_arguments_of_a_search_are_one_line(arguments, told, capsys):
    """Oracle: code 2, nothing on the output, and a line that names the value."""
    asked = ["--model=resnet50", "--machine=v100-edr", "--ranks=4", *arguments.split()]
    assert simulate.main(asked) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert told in output.err
