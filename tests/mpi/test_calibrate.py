"""Calibration on a few short messages and small factors."""

from __future__ import annotations

import math

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, Strategy
from mpikfac_apps.lab.predict import calibrate
from support import problem

pytestmark = pytest.mark.usefixtures("made_on_the_host")

WORDS = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.entries, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 5)

    def forward(self, words):
        return self.head(self.entries(words)).movedim(2, 1)

def build():
    return Words()
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibrate, "ELEMENTS", [256, 1024, 2**14])
    monkeypatch.setattr(calibrate, "BUDGET", 1e-3)
    monkeypatch.setattr(calibrate, "STEPS_BUDGET", 0.0)
    monkeypatch.setattr(calibrate, "CUBES", [16, 32])
    monkeypatch.setattr(calibrate, "LONGEST", math.inf)  # a busy machine measures all orders, too


def test_a_machine_is_measured_and_simulated(comm, quick, tmp_path):
    """Oracle: divisors of the ranks; all primitives; every time is positive; the file is read."""
    path = comm.bcast(tmp_path) / "machine.json"
    asked = ["--out", str(path), "--model", "digits_cnn", "--batch_per_rank", "4"]
    if comm.size == 1:
        with pytest.raises(SystemExit) as left:
            calibrate.main(asked)
        assert left.value.code == 2 and not path.exists()
        return
    assert calibrate.main(asked) == 0
    comm.Barrier()
    machine = mpikfac.predict.load_machine(str(path))
    assert {sample.ranks for sample in machine.samples} == {*mpikfac.plan.divisors(comm.size)[1:]}
    found = {sample.primitive for sample in machine.samples if sample.codec is None}
    collectives = {"Allreduce", "Alltoall", "Reduce_scatter", "Allgatherv", "Reduce", "Bcast"}
    assert found - {"Send"} == collectives and ("Send" in found) == (comm.size % 2 == 0)
    assert {sample.codec for sample in machine.samples} == {None, "bfloat16", "int8"}
    for sample in machine.samples:
        of_each = {None: 4, "bfloat16": 2, "int8": 17 / 16}[sample.codec]
        sizes = [of_each * elements for elements in (256, 1024, 2**14)]
        assert [size for size, _ in sample.points] == pytest.approx(sizes, rel=0.1)
        assert (sample.nodes, sample.sharing) == (1, 1)
    assert machine.ranks_per_node is None and machine.between is None
    (network,) = machine.networks
    assert (network.model, network.batch) == ("digits_cnn", 4)
    assert min(network.forward, network.backward, network.gradients, network.optimizer) > 0
    assert min(network.precondition, network.vector_precondition) > 0
    assert -10 <= machine.hidden <= 1
    assert machine.about["ranks"] == comm.size and machine.about["packages"]
    layers, others = mpikfac.layers.covered_shapes(calibrate.models.build("digits_cnn", 10, 1))
    orders = sorted({order for layer in layers for order in (layer.inputs, layer.outputs)})
    assert [order for order, _ in machine.decompositions["eigen"]] == orders
    strategy = Strategy(CommOpt())
    assert [order for order, _ in machine.decompositions["shampoo"]] == orders
    assert [order for order, _ in machine.products] == calibrate.CUBES
    assert min(rate for _, rate in machine.products) > 0
    for preconditioner in ("inverse", "eva", "shampoo", "soap", "muon"):
        plan = mpikfac.make_plan(layers, comm.size, strategy, others, preconditioner)
        prediction = mpikfac.predict.simulate(plan, machine, mpikfac.predict.Job("digits_cnn", 4))
        assert prediction.mean.seconds > prediction.mean.exposed > 0


def test_a_model_of_ones_own_is_measured(comm, quick, tmp_path):
    """Oracle: the entry under the model's name, with positive times; a model of words."""
    folder = comm.bcast(tmp_path)
    file = folder / f"own_{comm.rank}.py"  # ranks write at the same time
    file.write_text(WORDS)
    asked = ["--out", str(folder / "words.json"), "--model", f"{comm.bcast(file)}:build"]
    comm.Barrier()
    if comm.size == 1:
        return
    assert calibrate.main([*asked, "--input", "6", "--tokens", "9", "--batch_per_rank", "2"]) == 0
    comm.Barrier()
    (network,) = mpikfac.predict.load_machine(str(folder / "words.json")).networks
    assert (network.model, network.batch) == (asked[-1], 2)
    assert min(network.forward, network.backward, network.precondition) > 0


def test_a_shape_replaces_the_usual_shape():
    """Oracle: the factor of the first convolution has 3 x 3 x 3 rows, of grey digits 3 x 3."""
    gray, coloured = (
        calibrate.TimedNetwork("digits_cnn", 2, shape, None, torch.device("cpu")).orders
        for shape in (None, (3, 16, 16))
    )
    assert coloured - gray == {27} and gray - coloured == {9}


@pytest.mark.parametrize(
    ("ranks", "size", "distance", "hosts", "placed"),
    [
        (4, 2, 1, "aabb", (1, 1)),
        (4, 2, 2, "aabb", (2, 2)),  # 0 and 2, 1 and 3: both leave each node
        (4, 4, 1, "aabb", (2, 1)),
        (4, 2, 1, "abab", (2, 2)),
    ],
)
def test_where_groups_lie_is_noted(comm, quick, monkeypatch, ranks, size, distance, hosts, placed):
    """Oracle: by hand, ranks on hosts a and b: nodes of a group, and groups that leave a node."""
    if comm.size != ranks:
        assert comm.size < ranks  # nothing to lay out on fewer
        return
    monkeypatch.setattr(calibrate, "ELEMENTS", [256])
    samples = calibrate.message_samples(comm, problem.DEVICE, list(hosts), size, distance)
    assert {(sample.nodes, sample.sharing) for sample in samples} == {placed}
    assert {sample.ranks for sample in samples} == {size}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "resnet20"], "options: --out is missing: the file to write"),
        (["--out", "/nowhere/m.json"], "options: out=/nowhere/m.json: /nowhere is not a directory"),
        (
            ["--out", "m.json", "--model", f"{__file__}:quick"],
            "options: your own model needs --input, such as 3,32,32",
        ),
        (["--out", "m.json", "--model", "resnet5"], "model=resnet5 is unknown; try one of"),
    ],
)
def test_bad_options_are_one_line_and_no_rank_is_left(comm, arguments, told, capfd):
    with pytest.raises(SystemExit) as left:
        calibrate.main(arguments)
    errors = capfd.readouterr().err
    assert left.value.code == 2
    if comm.rank == 0:
        assert errors.count("\n") == 1 and told in errors
