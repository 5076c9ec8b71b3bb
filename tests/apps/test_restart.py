"""A run that was stopped, killed, or moved to other ranks equals the uninterrupted run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os

import pytest
import torch

import mpikfac
from mpikfac_apps.training import train
from mpikfac_apps.training.run import Run
from support.launch import PROGRAMS, launch, run_each

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
RANKS = [1, 2, 3, 4, 8] if SOAK else [1, 2, 3, 4]
PAIRS = list(itertools.permutations(RANKS, 2))  # of ranks before and after
ONWARD = PAIRS if SOAK else list(zip(RANKS, [*RANKS[1:], RANKS[0]]))
STEPS = 9  # 3 steps are an epoch; factors at every step, decompositions at every second step
STOP = 5
QUICK = (
    *("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=1", "--threads=1"),
    "--kfac.inv_update_steps=2",
)
DELAY = ("--refresh.staleness=1",)
COPIES = ("--sync=local-sgd", f"--sync.sync_every={STOP}")
OWNERS = ("--strategy=mem-opt", "--assignment.factor_reduction=reduce_scatter")
STRATEGIES = {
    "sgd": ("--optimizer=sgd",),
    "delay": DELAY,
    "eigen": ("--kfac.preconditioner=eigen", "--kfac.inv_update_steps=3"),
    "low rank": (
        "--kfac.preconditioner=eigen",
        "--kfac.rank=8",
        "--kfac.inv_update_steps=3",
        *DELAY,
    ),
    "owners": (*OWNERS, *DELAY),
    "owner updates": ("--assignment.shard_optimizer=true", "--assignment.colocate_factors=false"),
    "copies": ("--optimizer=sgd", *COPIES),
    "copies with K-FAC": COPIES,
    "own batch": ("--strategy=mem-opt", "--assignment.factor_reduction=local"),
}
# A network whose numbers do not depend on the ranks, except for rounding; a placement per ranks.
# A resumed run keeps the placement before, so a run names all its choices.
MOVED = (*("--model=plain", *DELAY),)
PLACEMENTS = {
    1: (
        *("--assignment=comm-opt", "--assignment.shard_optimizer=false"),
        "--assignment.colocate_factors=true",
    ),
    2: ("--assignment=mem-opt", "--assignment.factor_reduction=reduce_scatter"),
    3: (
        "--assignment=comm-opt",
        "--assignment.shard_optimizer=true",
        "--assignment.colocate_factors=false",
    ),
    4: (
        "--assignment=hybrid-opt",
        "--assignment.grad_workers=2",
        "--assignment.factor_reduction=reduce_scatter",
    ),
    8: (
        "--assignment=hybrid-opt",
        "--assignment.grad_workers=4",
        "--assignment.factor_reduction=allreduce",
    ),
}
# A network that depends on the ranks, unless the batch comes in parts: runs on these ranks.
IN_ORDER = (f"--transport.virtual_ranks={24 if SOAK else 12}",)
LADDER = (4, 2), (2, 4), (4, 6), (1, STEPS)  # ranks, and the step at which they stop
# The runs of `job` count as one test's.
pytestmark = [pytest.mark.slow, pytest.mark.gate, pytest.mark.timeout(1800)]
CLOCKS = ("seconds", "images_per_second", "communication")


def options(run_dir, *more):
    return [*QUICK, f"--run_dir={run_dir}", *more]


def content(run_dir, step=STEPS):
    """Return SHA-256 of every item of a run's checkpoint, without times."""
    saved = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    names = saved.keys() - {"run/seconds", "run/metrics_bytes"}
    return {name: hashlib.sha256(as_bytes(saved[name])).hexdigest() for name in names}


def as_bytes(item):
    return item.numpy().tobytes() if torch.is_tensor(item) else repr(item).encode()


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in CLOCKS} for row in lines]


def assert_same_run(found, expected):
    items, of_expected = content(found), content(expected)
    assert items.pop("run/data") and of_expected.pop("run/data")  # the options may differ
    assert items == of_expected
    assert rows(found) == rows(expected)


def log(run_dir):
    return (run_dir / "log.txt").read_text()


def several(root):
    """Yield ranks and options of the runs on several ranks, in the runs' order."""
    for name, more in STRATEGIES.items():
        for ranks in RANKS[1:] if SOAK else [2]:
            whole, parts = (options(root / f"{kind} {name} {ranks}", *more) for kind in "AB")
            yield ranks, whole
            yield ranks, [*parts, f"--max_steps={STOP}"]
            yield ranks, [*parts, "--resume=auto"]
    again = ("--resume=auto", "--checkpoint_every=null")
    yield 2, [*options(root / "killed", *STRATEGIES["owners"]), *again]
    yield 1, options(root / "plain", *MOVED)
    for ranks in RANKS:
        first = options(root / f"from {ranks}", *MOVED, *PLACEMENTS[ranks])
        yield ranks, [*first, f"--max_steps={STOP}"]
    for before, after in PAIRS:
        saved = root / f"from {before}" / "checkpoints" / f"step-{STOP:09d}"
        moved = options(root / f"{before} to {after}", *MOVED, *PLACEMENTS[after])
        yield after, [*moved, f"--resume={saved}", f"--max_steps={STOP}"]
    for before, after in ONWARD:
        moved = options(root / f"{before} to {after}", *MOVED, *PLACEMENTS[after])
        yield after, [*moved, "--resume=auto"]
    for ranks in RANKS:
        yield ranks, options(root / f"in order {ranks}", *IN_ORDER)
    for ranks, last in LADDER:
        ladder = options(root / "ladder", *IN_ORDER, "--resume=auto")
        yield ranks, [*ladder, f"--max_steps={last}"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the directory of the runs on several ranks, made one after the other."""
    root = tmp_path_factory.mktemp("restart")
    killed = options(root / "killed", *STRATEGIES["owners"], "--checkpoint_every=2")
    ended = launch(2, str(PROGRAMS / "killed.py"), "1", "7", "0", *killed)
    assert ended.returncode not in (0, 2), ended.stderr
    run_each(list(several(root)), root, timeout=1200)
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of an uninterrupted run on one rank."""
    root = tmp_path_factory.mktemp("whole")
    assert train.main(options(root, *DELAY)) == 0
    return root


@pytest.mark.parametrize("stop", range(1, STEPS + 1))
def test_a_run_that_stops_anywhere_goes_on_to_the_last_bit(tmp_path, whole, stop):
    """Oracle: all items and metrics of the uninterrupted run."""
    assert train.main(options(tmp_path, *DELAY, f"--max_steps={stop}")) == 0
    assert train.main(options(tmp_path, *DELAY, "--resume=auto")) == 0
    assert_same_run(tmp_path, whole)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, whole):
    """Oracle: all items and metrics of the uninterrupted run; the log names both checkpoints."""
    chosen = options(tmp_path, *DELAY, "--checkpoint_every=2")
    assert train.main([*chosen, "--max_steps=6"]) == 0
    shard = tmp_path / "checkpoints" / "step-000000006" / "shard-0.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert train.main([*chosen, "--resume=auto"]) == 0
    before = tmp_path / "checkpoints" / "step-000000004"
    assert f"{shard} is damaged: its BLAKE3 digest differs" in log(tmp_path)
    assert f"from the manifest; continuing from {before}" in log(tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_checkpoint_from_which_runs_die_is_passed_over(tmp_path, whole, monkeypatch):
    """Oracle: all items and metrics of the uninterrupted run; the third start logs the change."""

    def die(self):
        raise mpikfac.UserError("on purpose")

    chosen = options(tmp_path, *DELAY, "--checkpoint_every=2")
    assert train.main([*chosen, "--max_steps=6"]) == 0
    newest, before = (tmp_path / "checkpoints" / f"step-00000000{step}" for step in (6, 4))
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Run, "train", die)
            train.main([*chosen, "--resume=auto"])
        assert f"continuing from {before}" not in log(tmp_path)
    assert train.main([*chosen, "--resume=auto"]) == 0
    passed = f"{newest}: the last 2 starts from it committed no newer checkpoint"
    assert f"{passed}; continuing from {before}" in log(tmp_path)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("ranks", RANKS[1:] if SOAK else [2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_goes_on_to_the_last_bit(job, name, ranks):
    """Oracle: all items and metrics of the uninterrupted run on as many ranks."""
    assert_same_run(job / f"B {name} {ranks}", job / f"A {name} {ranks}")


def test_a_killed_run_goes_on_to_the_last_bit(job):
    """Oracle: all items and metrics of the uninterrupted run on as many ranks."""
    assert "continuing from" in log(job / "killed")
    assert_same_run(job / "killed", job / "A owners 2")


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_other_ranks_with_another_placement_load_every_bit(job, before, after):
    """Oracle: the saved state; the run saves again right after loading.

    A run in another directory begins to follow tests anew, and has the placement of its start.
    """
    found, expected = (
        content(job / name, STOP) for name in (f"{before} to {after}", f"from {before}")
    )
    of_a_start = {"run/best", "run/since_best", "run/data"}
    assert found.pop("run/data")
    assert found == {name: item for name, item in expected.items() if name not in of_a_start}


@pytest.mark.parametrize(("before", "after"), ONWARD)
def test_other_ranks_with_another_placement_go_on(job, before, after):
    """Oracle: the losses of the uninterrupted run of one rank, to rounding."""
    losses, expected = (
        {row["step"]: row["loss"] for row in rows(run) if "loss" in row and row["step"] > STOP}
        for run in (job / f"{before} to {after}", job / "plain")
    )
    assert losses == pytest.approx(expected, rel=1e-5)


def in_order(run_dir):
    """Return the content that must not depend on the ranks.

    Metrics are sums over ranks.
    """
    found = content(run_dir).items()
    return {k: v for k, v in found if k.startswith(("model/", "optimizer/", "kfac/", "trainer/"))}


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_sums_in_order_make_the_same_weights_on_all_numbers_of_ranks(job, ranks):
    """Oracle: the final state on a single rank."""
    assert in_order(job / f"in order {ranks}") == in_order(job / "in order 1")


def test_sums_in_order_make_the_same_weights_when_ranks_change_on_the_way(job):
    """Oracle: the final state on a single rank without interruption."""
    assert in_order(job / "ladder") == in_order(job / "in order 1")
