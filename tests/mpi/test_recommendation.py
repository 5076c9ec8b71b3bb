"""Embedding tables owned by ranks, and the training of a DLRM."""

from __future__ import annotations

import copy
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac_apps.recommendation import clicks, train
from mpikfac_apps.recommendation.tables import BACKWARD, FORWARD, Tables
from mpikfac_apps.recommendation.train import Recommendation, RecommendationOptions
from support.problem import DEVICE

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(
        "emulated" in sys.modules, reason="the emulated device has no sparse gradients"
    ),
]

EXAMPLES, STEPS = 120, 6
SIZES = {"a": 7, "b": 40, "c": 3, "d": 11, "e": 11}


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def ratings(tmp_path):
    """Return the path of a file of ratings; each rank has a file of its own, all alike."""
    draws = np.random.default_rng(5)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for second in draws.permutation(EXAMPLES):
        user, item, rating = draws.integers((1, 1, 1), (9, 30, 6))
        lines.append(f"{user}\t{item}\t{rating}\t{881250949 + 4000 * second}")
    path = tmp_path / "small.inter"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".user").write_text("user_id:token\tage:token\n1\t24\n2\t53\n")
    return str(path)


def work_of(comm, ratings, **options):
    """Return the training of a small DLRM."""
    torch.manual_seed(0)
    usual = {"width": 4, "bottom": [6], "top": [5], "batch": 13, "epochs": 2, "seed": 3}
    options = RecommendationOptions(data=ratings, **{**usual, **options})
    return Recommendation(comm, options, DEVICE)


def everything(comm, work):
    """Return the state of all ranks, in numpy."""
    found = {}
    for state in comm.allgather(work.state()):
        found |= state
    return {k: v.cpu().numpy() for k, v in found.items() if torch.is_tensor(v)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-8, 1e-10, err_msg=name)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd", "adamw"])
def test_all_ranks_together_train_as_one(comm, ratings, optimizer):
    """Oracle: the training of the whole batches on a rank alone; 13 clicks are uneven shares."""
    work = work_of(comm, ratings, optimizer=optimizer)
    alone = comm.Split(comm.rank)
    serial = work_of(alone, ratings, optimizer=optimizer)
    for step in range(STEPS):
        loss, examples, _ = work.step(step)
        mean = mpikfac.comm.summed(comm, [float(loss) * examples / 13])[0]
        assert mean == pytest.approx(float(serial.step(step).loss), rel=1e-9)
    assert_same(everything(comm, work), everything(alone, serial))
    assert work.test() == pytest.approx(serial.test(), rel=1e-9)


def test_a_step_is_that_of_plain_torch(comm, ratings):
    """Oracle: the same network with ordinary embeddings and Adagrad of dense gradients."""
    work = work_of(comm, ratings, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    model, tables = copy.deepcopy(work.model), nn.ModuleList()
    state = everything(comm, work)
    names = clicks.read(ratings, 2).sizes
    for name in names:
        weight = torch.from_numpy(state[f"tables/{name}"]).to(DEVICE)
        tables.append(nn.Embedding.from_pretrained(weight, freeze=False))
    steppers = [
        torch.optim.SGD(model.parameters(), work.options.rate),
        torch.optim.Adagrad(tables.parameters(), work.options.table_lr),
    ]
    for step in range(STEPS):
        order = train.shuffled(work.trained, 3, step // work.steps_per_epoch)
        start = step % work.steps_per_epoch * 13
        chosen = order[start : start + 13].to(DEVICE)
        rows = [table(work.categories[chosen, k]) for k, table in enumerate(tables)]
        logits = model(work.numbers[chosen], torch.stack(rows, 1))
        for stepper in steppers:
            stepper.zero_grad()
        F.binary_cross_entropy_with_logits(logits, work.labels[chosen]).backward()
        for stepper in steppers:
            stepper.step()
        work.step(step)
    found = everything(comm, work)
    for name, table in zip(names, tables):
        expected = table.weight.detach().cpu()
        np.testing.assert_allclose(found[f"tables/{name}"], expected, 1e-8, 1e-10)
    for name, parameter in model.named_parameters():
        expected = parameter.detach().cpu()
        np.testing.assert_allclose(found[f"model/{name}"], expected, 1e-8, 1e-10)


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_a_run_goes_on_on_another_number_of_ranks(comm, ratings, optimizer, tmp_path):
    """Oracle: the run without a restart; a rank alone reads what all ranks wrote, and back."""
    root = comm.bcast(str(tmp_path))
    made = partial(work_of, ratings=ratings, optimizer=optimizer)
    whole, alone = made(comm), comm.Split(comm.rank)
    for step in range(STEPS):
        whole.step(step)
    first = made(comm)
    for step in range(2):
        first.step(step)
    mpikfac.save_checkpoint(comm, f"{root}/all", first.state(), 2)
    serial = made(alone)
    serial.load(mpikfac.load_checkpoint(alone, f"{root}/all/step-000000002"))
    for step in range(2, 4):
        serial.step(step)
    mpikfac.save_checkpoint(alone, f"{root}/{comm.rank}", serial.state(), 4)
    comm.Barrier()
    last = made(comm, seed=8)
    last.load(mpikfac.load_checkpoint(comm, f"{root}/0/step-000000004"))
    last.options = whole.options
    for step in range(4, STEPS):
        last.step(step)
    assert_same(everything(comm, last), everything(comm, whole))


def test_planned_bytes_are_counted_bytes(comm, ratings):
    """Oracle: the trace; and by hand: numbers of 8 bytes, rows of 4 float64, for 13 clicks."""
    work = work_of(comm, ratings)
    trace = work.trainer.trace
    for step in range(2):
        trace.clear()
        work.step(step)
        _, shares = work.share_of(torch.arange(13))
        messages = work.tables.messages(shares)
        for stage in (FORWARD, BACKWARD):
            planned = sum(message.bytes for message in messages if message.stage == stage)
            assert trace.sent[stage] == planned
    sent = mpikfac.comm.summed(comm, [float(sum(message.bytes for message in messages))])[0]
    assert sent == (13 * len(work.tables.owners) * (8 + 2 * 32) if comm.size > 1 else 0)


def test_rows_of_tables_reach_the_examples(comm):
    """Oracle: the tables of all owners, indexed by numpy; ranks without examples or tables too."""
    tables = Tables(comm, SIZES, 3, 0.1, 0, DEVICE, mpikfac.Trace())
    whole = {}
    for state in comm.allgather({k: v.cpu().numpy() for k, v in tables.state().items()}):
        whole |= state
    for shares in ([5] * comm.size, [4 * (rank % 2) for rank in range(comm.size)]):
        draws = np.random.default_rng(comm.rank)
        places = draws.integers(0, list(SIZES.values()), (shares[comm.rank], len(SIZES)))
        found = tables.rows(torch.from_numpy(places).to(DEVICE), shares)
        expected = [whole[f"tables/{name}"][places[:, k]] for k, name in enumerate(SIZES)]
        assert np.array_equal(found.detach().cpu(), np.stack(expected, 1))


def test_the_largest_table_goes_to_the_rank_with_fewest_rows(comm):
    """Oracle: by hand, for 1 to 4 ranks."""
    owners = Tables(comm, SIZES, 3, 0.1, 0, DEVICE, mpikfac.Trace()).owners
    by_hand = {
        1: {"b": 0, "d": 0, "e": 0, "a": 0, "c": 0},
        2: {"b": 0, "d": 1, "e": 1, "a": 1, "c": 1},
        3: {"b": 0, "d": 1, "e": 2, "a": 1, "c": 2},
        4: {"b": 0, "d": 1, "e": 2, "a": 3, "c": 3},
    }
    if comm.size in by_hand:
        assert owners == by_hand[comm.size]


def test_more_ranks_than_tables_train(comm, ratings):
    """Oracle: no error, and finite weights, on owners of nothing too."""
    tables = Tables(comm, {"one": 5}, 3, 0.1, 0, DEVICE, mpikfac.Trace())
    places = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    tables.rows(places, [2] * comm.size).sum().backward()
    tables.step()
    for name, table in tables.state().items():
        assert name.startswith("tables/one")
        assert table.isfinite().all()
    assert bool(tables.state()) == (comm.rank == 0)
