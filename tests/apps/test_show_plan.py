"""The plan program: numbers are the plan's own numbers, an error is a single line."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mpikfac
from mpikfac_apps.planning.facts import looked_at, most_loaded
from mpikfac_apps.planning.options import PLAN
from mpikfac_apps.planning.plan import main, plan_of
from mpikfac_apps.problems.models import build, shapes_of
from support.pace import paced

SHARDS = "--model digits_cnn --strategy sharded-optimizer --fully_shard"


def words(text: str, line: str) -> list[str]:
    """Return the words of the first line that starts with `line`."""
    return next(found for found in text.splitlines() if found.strip().startswith(line)).split()


def test_numbers_are_those_of_hand_counts(capsys):
    """Oracle: ResNet-20's gradients and factors counted by hand from the network's layer shapes."""
    assert (
        main(
            [
                "--model",
                "resnet20",
                "--ranks",
                "4",
                "--assignment",
                "hybrid-opt",
                "--assignment.grad_workers",
                "2",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    orders = [(27, 16), *[(144, 16)] * 6, (144, 32), *[(288, 32)] * 5]
    orders += [(288, 64), *[(576, 64)] * 5, (65, 10)]
    triangles = sum(n * (n + 1) // 2 for pair in orders for n in pair) * 4 / 2**20
    assert float(words(text, "statistics")[-1]) == pytest.approx(triangles, abs=0.01)
    reduced = words(text, "reduce statistics  Allreduce")
    assert float(reduced[-2]) == pytest.approx(triangles, abs=0.01)
    assert float(reduced[-1]) == pytest.approx(2 * 3 / 4 * triangles, abs=0.01)
    work = sum(n**3 for pair in orders for n in pair)
    assert float(words(text, "all ranks together")[3]) == pytest.approx(work, rel=0.01)
    assert f"at most {work / 576**3:.2f}x" in text


def test_the_load_is_that_of_the_preconditioner(capsys):
    """Oracle: the sum of the orders, and the largest, for work that grows with the order."""
    diagonal = Path(__file__).parents[1] / "support" / "diagonal.py"
    arguments = ["--preconditioner", f"{diagonal}:Diagonal", "--ranks", "4", "--budget", "null"]
    assert main(["--model", "resnet20", *arguments]) == 0
    text = capsys.readouterr().out
    orders = [(27, 16), *[(144, 16)] * 6, (144, 32), *[(288, 32)] * 5]
    orders += [(288, 64), *[(576, 64)] * 5, (65, 10)]
    work = sum(map(sum, orders))
    assert "as the sum of n\n" in text
    assert float(words(text, "all ranks together")[3]) == pytest.approx(work, rel=0.01)
    ratio = 4 * float(words(text, "most loaded rank")[3]) / work
    assert float(words(text, "longest over mean load")[4][:-1]) == pytest.approx(ratio, abs=0.02)
    assert f"at most {work / 576:.2f}x" in text


@pytest.mark.parametrize(
    ("choices", "averages", "momenta"),
    [
        ([], 1, 2),
        (["--momentum_of", "directions"], 1, 0),
        (["--clip", "fisher", "--clip.max_norm", "1"], 0, 0),
    ],
)
def test_memory_of_lengths_is_printed(choices, averages, momenta, capsys):
    """Oracle: by hand: an average for each weight of ResNet-20 and each running statistic.

    Momentum of gradients keeps two more numbers.
    """
    assert (
        main(
            [
                "--model",
                "resnet20",
                "--ranks",
                "2",
                "--assignment",
                "hybrid-opt",
                "--assignment.grad_workers",
                "2",
                *choices,
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    layers, uncovered = shapes_of("resnet20")
    sizes = [math.prod(layer.gradient) for layer in layers]
    numbers = sum(sizes) + sum(math.prod(shape) for _, shape in uncovered)
    kinds = ("lengths", "momenta")  # without a line if no rank keeps any
    mib = [float(words(text, kind)[-1]) if f"\n  {kind}" in text else 0.0 for kind in kinds]
    found = [size * 2**20 / 4 for size in mib]
    assert found == pytest.approx([averages * numbers, momenta * numbers], rel=0.01)


def test_a_preconditioner_without_factors_has_one_kind_of_step(capsys):
    """Oracle: by hand: ResNet-20 has 20 layers; Muon's ranks send gradients and directions."""
    assert (
        main(["--model=resnet20", "--ranks=4", "--preconditioner=muon", "--strategy=mem-opt"]) == 0
    )
    text = capsys.readouterr().out
    owners = text.partition("Layers without factors")[2].partition("Load")[0]
    assert len(re.findall(r"\b(?:layer\d\S+|conv1|fc) c[0-3]\b", owners)) == 20
    assert text.count("reduce gradients") == text.count("publish gradients") == 1
    assert "Every step" in text and "statistics" not in text and "bases" not in text
    assert main(["--model=resnet20", "--ranks=4", "--preconditioner=shampoo"]) == 0
    assert "Step with new factors: the same messages as 'Ordinary step'" in capsys.readouterr().out


@pytest.mark.gate
@pytest.mark.parametrize(("model", "layers"), [("resnet56", 56), ("resnet152", 156)])
def test_every_layer_is_listed_once(model, layers, capsys):
    """Oracle: every network's layers in its paper, shortcuts included; the second list is brief."""
    main(
        [
            "--model",
            model,
            "--ranks",
            "8",
            "--assignment",
            "hybrid-opt",
            "--assignment.grad_workers",
            "8",
        ]
    )
    owners = capsys.readouterr().out.partition("Owners")[2].partition("Load")[0]
    assert len(re.findall(r"\b(?:layer\d\S+|conv1|fc)(?= )", owners)) == layers


@pytest.mark.gate
@pytest.mark.parametrize(
    "choice",
    [
        "--assignment=hybrid-opt --assignment.grad_workers=64",
        "--strategy=deferred-sharded",
        "--strategy=comm-opt",
    ],
)
def test_a_large_job_is_planned_in_seconds(choice, capsys):
    """Oracle: of 16,384 ranks, a sample of the ranks is used, and the text names the sample."""
    assert main(["--model", "resnet50", "--ranks", "16384", *choice.split()]) == 0
    assert " of 16384 ranks)" in capsys.readouterr().out


def test_one_rank_sends_nothing(capsys):
    main(["--model", "digits_cnn", "--ranks", "1"])
    assert capsys.readouterr().out.count("no messages") == 3


def test_collectives_are_told_apart_where_some_columns_have_no_layers(capsys):
    """Oracle: stages of `KFAC.step`; 8 columns share 4 layers, hence 4 columns publish no bases."""
    assert (
        main(
            [
                "--model",
                "digits_cnn",
                "--ranks",
                "16",
                "--assignment",
                "hybrid-opt",
                "--assignment.grad_workers",
                "2",
            ]
        )
        == 0
    )
    step = capsys.readouterr().out.partition("Step with new factors and bases")[2]
    stages = ["reduce statistics", "publish bases", "reduce gradients", "publish gradients"]
    assert re.findall(r"^  ([a-z]+ [a-z]+) ", step, re.MULTILINE) == stages
    assert words(step, "reduce gradients")[-4:-1] == ["0.15"] * 3


def test_messages_of_two_levels_are_listed_by_kind(capsys):
    """Oracle: 16 ranks on 4 nodes, by hand; shards are a quarter, and so are nodes of the world."""
    options = ["--model", "digits_cnn", "--ranks", "16", "--transport.ranks_per_node", "4"]
    assert main(options) == 0
    step = capsys.readouterr().out.partition("Ordinary step")[2].partition("Step with")[0]
    rows = [line.rsplit(maxsplit=5) for line in step.splitlines() if "reduce gradients" in line]
    kinds = [" ".join(row[0].split()[2:]) for row in rows]
    assert kinds == [
        "Reduce_scatter world in node",
        "Allreduce world between nodes",
        "Allgatherv world in node",
    ]
    assert [row[1:-1] for row in rows] == [["1", *["0.15"] * 3], *[["1", *["0.04"] * 3]] * 2]


def test_compressed_messages_of_two_levels_are_listed_by_kind(capsys):
    """Oracle: matrices stay whole, so some of 4 ranks of a node may send nothing to other nodes."""
    options = ["--model", "digits_cnn", "--ranks", "8", "--transport.ranks_per_node", "4"]
    assert main([*options, "--strategy", "power-sgd"]) == 0
    found = capsys.readouterr().out
    step = found.partition("Ordinary step")[2].partition("Step with")[0]
    kinds = [" ".join(row.split()[2:-5]) for row in step.splitlines() if "reduce grad" in row]
    assert kinds == [
        "Reduce_scatter world in node",
        "Allreduce, Allreduce (power-sgd) world between nodes",
        "Allgatherv world in node",
        "Allreduce world between nodes",
    ]
    assert words(found, "wires")[1] == "0.00"


def test_messages_to_a_curvature_rank_are_listed(capsys):
    """Oracle: a rank's own message has all of the rank's factors; statistics also hold counts."""
    options = ["--model", "resnet20", "--ranks", "1", "--strategy", "curvature-servers"]
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "1 more rank decomposes for these ranks" in text
    triangles = float(words(text, "statistics")[-1])
    assert float(words(text, "send factors")[-1]) == pytest.approx(triangles, abs=0.02)
    assert words(text, "receive bases")[:4] == ["receive", "bases", "Recv", "curvature"]


@pytest.mark.parametrize("shards", ["false", "true"])
@pytest.mark.parametrize("way", [["--strategy", "sgd"], ["--skip", '["0","3","8","10"]']])
def test_a_plan_without_layers_is_that_of_data_parallelism(way, shards, capsys):
    """Oracle: the network's 38,330 parameters, and 96 numbers of BatchNorm's statistics."""
    options = ["--model", "digits_cnn", "--ranks", "2", "--assignment.shard_optimizer", shards]
    assert main([*options, *way]) == 0
    text = capsys.readouterr().out
    assert "no layer is covered by K-FAC" in text
    assert float(words(text, "gradients")[-1]) == pytest.approx(4 * (38330 + 96) / 2**20, abs=0.01)
    assert "statistics" not in text and "Every step" in text


OWN = """
import torch, mpikfac

class Scaled(torch.nn.Linear):
    pass

def build():
    return torch.nn.Sequential(Scaled(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

def none():
    return None

def bounded():
    linear = [torch.nn.Linear(4, 4) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Embedding(4, 4, max_norm=1.0), *linear)
"""


@pytest.mark.parametrize(("more", "layers"), [("", 1), ("COVERS = {Scaled: mpikfac.Layer}\n", 1)])
def test_a_model_of_ones_own_is_planned(tmp_path, capsys, more, layers):
    """Oracle: the plan of the library for the same module, by its digest."""
    file = tmp_path / "own.py"
    file.write_text(OWN + more)
    assert main(["--model", f"{file}:build", "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    place: dict = {}
    exec(OWN + more, place)
    coverage = mpikfac.Coverage(covers=place.get("COVERS", mpikfac.KINDS))
    found, others = mpikfac.layers.covered_shapes(place["build"](), coverage)
    assert len(found) == layers and found[0].name == ("0" if more else "2")
    plan = mpikfac.make_plan(found, 2, mpikfac.Strategy(), others)
    assert f"plan {plan.digest()}" in text and text.startswith(f"{file}:build on 2 ranks")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:build", "nowhere.py is not a file"),
        ("own.py:missing", "own.py has no function 'missing'"),
        ("own.py:none", "none() returned NoneType, not a torch.nn.Module"),
        ("own.py", "own.py does not name a function; try own.py:FUNCTION"),
        (
            "own.py:build --classes 3",
            "classes=3 needs a network with a parameter named classes, unlike own.py:build",
        ),
    ],
)
def test_a_file_without_a_model_is_one_line(tmp_path, monkeypatch, capsys, name, message):
    """Oracle: the messages, written out."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["--model", *name.split(), "--ranks", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpikfac plan: ") and message in line


def test_a_refused_module_may_be_skipped_by_the_option_in_the_message(tmp_path, capsys):
    """Oracle: the plan with the message's own words behind the command."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    asked = ["--model", f"{file}:bounded", "--ranks", "2", "--skip", '["1"]']
    assert main(asked) == 2
    told = capsys.readouterr().err.partition("for first-order training, pass ")[2]
    option, names = shlex.split(told)
    assert main([*asked[:-2], option, names]) == 0
    assert (option, names) == ("--skip", '["1", "0"]')


@pytest.mark.gate
def test_mpi_is_not_imported():
    """Oracle: the imported modules; a laptop without MPI prints the plan of a cluster's job."""
    program = (
        "import sys; from mpikfac_apps.__main__ import main; "
        "code = main(['plan', '--model', 'digits_cnn', '--ranks', '4']); "
        "sys.exit(code or any(name.startswith('mpi4py') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=paced(240)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--model resnet5 --ranks 2", "resnet20"),
        (
            "--model resnet20 --ranks 6 --assignment hybrid-opt --assignment.grad_workers 4",
            "[1, 2, 3, 6]",
        ),
        ("--model resnet20 --ranks 0", "must be a whole number >= 1"),
        ("--model resnet20 --ranks x", "whole number"),
        ("--model resnet20 --ranks 2 --assignment.factor_reduction all", "allreduce"),
        ("--model resnet20 --ranks 2 --depth 3", "unknown key depth"),
        ("--model resnet20 --ranks 2 --skip nothing", "nothing"),
        ("--model resnet20 --ranks 8 --fully_shard", "needs assignment.shard_optimizer=True"),
        (f"{SHARDS} --ranks 8 --replicas 3", "replicas=3 must divide the number of ranks (8)"),
        (f"{SHARDS} --ranks 8 --replicas 0", "replicas=0 must be a whole number >= 1"),
        (f"{SHARDS} --ranks 1024", "at most 512 ranks, not 1024"),
        ("--model resnet20 --ranks 8 --replicas 2", "replicas=2 needs fully_shard=true"),
        ("--model resnet20 --ranks 8 --fully_shrad", "did you mean fully_shard"),
        ("--ranks 2", "--model"),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, capsys):
    code = main(arguments.split())
    output = capsys.readouterr()
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert told in output.err


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_of_shards_are_planned(replicas, capsys):
    """Oracle: by hand: every parameter's rows in float32, and a number for each of its shards.

    Gradients are sent inside the owner's replica, and directions to all ranks.
    """
    asked = [*SHARDS.split(), "--ranks", "4", "--replicas", str(replicas)]
    plan, shards = plan_of(PLAN.read(asked)), 4 // replicas
    parameters = dict(build("digits_cnn").named_parameters())
    numbers, count = sum(p.numel() for p in parameters.values()), len(parameters)
    sent = {"gather gradients": [], "scatter directions": []}
    for rank in range(4):
        of_stage = {m.stage: m for m in plan.messages(rank, True, True)}
        for stage, of_ranks in sent.items():
            of_ranks.append(of_stage[stage].bytes)
    assert sum(sent["gather gradients"]) == 4 * (numbers + shards * count)
    assert sum(sent["scatter directions"]) == 4 * (replicas * numbers + 4 * count)
    if replicas == 1:
        chunks = [[len(c) * p[0].numel() for c in p.chunk(4)] for p in parameters.values()]
        rows = [sum(c[rank] for c in chunks if rank < len(c)) for rank in range(4)]
        assert sent["gather gradients"] == [4 * (own + count) for own in rows]
    assert main(asked) == 0
    text = capsys.readouterr().out
    of_each = "1 replica of 4 shards" if replicas == 1 else "2 replicas of 2 shards"
    assert f"fully_shard: {of_each}" in text
    assert text.count("gather gradients") == text.count("scatter directions") == 2
    assert "publish weights" not in text


@pytest.mark.gate
def test_sampled_ranks_include_the_most_loaded_one():
    """Oracle: the loads of all ranks; small jobs are sampled completely."""
    layers = [mpikfac.LayerShape(f"l{i}", 10 + i, 10) for i in range(600)]
    layers += [mpikfac.LayerShape("large", 21, 611)]
    plan = mpikfac.make_plan(
        layers, 400, mpikfac.Strategy(mpikfac.MemOpt(assignment_strategy="memory"))
    )
    busiest = max(range(400), key=plan.load)
    assert busiest == most_loaded(plan)
    assert busiest in looked_at(plan)
    assert looked_at(mpikfac.make_plan(layers, 256, mpikfac.Strategy())) == [*range(256)]


@pytest.mark.parametrize("columns", [7, 8, 64, 65])
def test_sampled_ranks_are_of_many_columns(columns):
    """Oracle: columns; least, median and most would lack columns outside of the sample."""
    plan = mpikfac.make_plan([], 64 * columns, mpikfac.Strategy(mpikfac.HybridOpt(grad_workers=64)))
    met = {plan.grid.position(rank)[1] for rank in looked_at(plan)}
    assert len(met) > columns / 2


def test_exchanges_of_weights_are_told_apart_from_other_steps(capsys):
    """Oracle: by hand: the weights travel in the place of the gradients."""
    options = [
        "--model",
        "digits_cnn",
        "--ranks",
        "4",
        "--assignment",
        "hybrid-opt",
        "--assignment.grad_workers",
        "4",
    ]
    assert main([*options, "--sync", "local-sgd", "--sync.sync_every", "8"]) == 0
    text = capsys.readouterr().out
    assert "exchange weights: after every 8 steps; other steps send no gradients" in text
    assert "reduce gradients" not in text and "in node" not in text
    options += ["--sync=lsgd", "--sync.sync_every=8"]
    assert main([*options, "--transport.ranks_per_node=2", "--sync.local_sync_every=2"]) == 0
    assert "exchange weights in node: after every 2 steps" in capsys.readouterr().out


def test_low_rank_is_planned(capsys):
    """Oracle: by hand: 144 inputs in blocks of 72; eight eigenvectors per block, and of outputs."""
    options = ["--model", "resnet20", "--ranks", "2", "--preconditioner", "eigen", "--rank", "8"]
    assert main([*options, "--largest", "100"]) == 0
    text = capsys.readouterr().out
    assert words(text, "layer1.1.conv1")[1:3] == ["72:8+72:8", "16:8"]
    assert "sum of n^3 (low rank: 2 n^2 rank)" in text


def test_blocks_norms_and_messages_beside_are_planned(capsys):
    """Oracle: by hand: 576 inputs in blocks of 300 at most; 16 units of two numbers; 39 layers."""
    options = ["--model", "resnet20", "--ranks", "2", "--norms", "--largest", "300"]
    assert main([*options, "--transport.overlap", "--transport.fusion", "1"]) == 0
    text = capsys.readouterr().out
    assert words(text, "layer3.1.conv1")[1:3] == ["288+288", "64"]
    assert words(text, "bn1")[1:5] == ["16", "x", "2", "-"]
    assert words(text, "reduce statistics")[2:5] == ["Allreduce", "world", "39"]


@pytest.mark.gate
def test_a_machine_makes_the_choices_that_the_options_leave_open():
    """Oracle: `mpikfac.predict.choose`."""
    asked = ["--model", "resnet50", "--ranks", "4", "--strategy", "auto", "--machine", "v100-edr"]
    plan = plan_of(PLAN.read(asked))
    machine = mpikfac.predict.load_machine("v100-edr")
    job = mpikfac.predict.Job("resnet50", 32)
    forms = mpikfac.preconditioners.forms("inverse")
    _, strategy = mpikfac.predict.choose(*shapes_of("resnet50"), 4, machine, job, forms)
    assert plan.strategy == strategy
