"""Every system call by which two ranks write a checkpoint: killed there, or refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import mpikfac
from mpikfac import CheckpointWriter, UserError, find_checkpoint, save_checkpoint
from support.forked import FORK, LEFT_ALONE, Comm, start, traced

pytestmark = [pytest.mark.slow, pytest.mark.gate]

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
CALLS = ("mkdir", "write", "fsync", "rename", "unlinkat", "rmdir")
KILLED, REFUSED = -9, 2


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        f"factors/{rank}": torch.full((50_000,), float(step)),
        "model/weight": torch.full((9_000,), -float(step)),
    }


def save(comm: Comm, root: Path) -> None:
    save_checkpoint(comm, root, state(2, comm.rank), 2, keep=1)


def write(comm: Comm, root: Path) -> None:
    writer = CheckpointWriter(comm, root, keep=1)
    writer.begin(state(2, comm.rank), 2)
    writer.commit()


def run(body, root: Path, *faults: str) -> tuple[list[int], list[str], str]:
    """Return the ranks' exit codes and refusals, and strace's log, of a checkpoint after step 1."""
    refusals = [FORK.Array("c", 2000, lock=False) for _ in range(2)]

    def rank(comm: Comm) -> None:
        try:
            body(comm, root)
        except UserError as error:
            refusals[comm.rank].value = str(error).encode()
            raise SystemExit(REFUSED) from None

    codes = FORK.Array("i", 2, lock=False)
    receive, send = os.pipe()

    def job() -> None:
        os.read(receive, 1)  # until strace is attached
        processes = start(2, rank)
        for process in processes:
            process.join()
        codes[:] = [process.exitcode for process in processes]

    ranks = FORK.Process(target=job)
    ranks.start()
    log = root.with_suffix(".log")
    with traced(ranks, log, f"--trace={','.join(CALLS)}", *faults):
        os.write(send, b"g")
        ranks.join()
    os.close(receive)
    os.close(send)
    return list(codes), [refusal.value.decode() for refusal in refusals], log.read_text()


def check(root: Path, codes: list[int]) -> None:
    """Check for a whole checkpoint: the new checkpoint, if any rank reported success."""
    found = find_checkpoint(mpikfac.world(), root)
    assert found is not None and found.step == (2 if 0 in codes else found.step)
    for rank in range(2):
        for name, value in state(found.step, rank).items():
            assert torch.equal(found[name], value)


@pytest.fixture
def begin(tmp_path):
    """Return a function that makes a directory with the checkpoint of step 1."""

    def make(name: str) -> Path:
        root = tmp_path / name / "checkpoints"
        save_checkpoint(mpikfac.world(), root, state(1, 0) | state(1, 1), 1)
        return root

    return make


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("body", [save, write] if SOAK else [save])
def test_a_kill_at_any_call_leaves_a_checkpoint(begin, body, call) -> None:
    """Oracle: the whole state of step 1 or 2; of step 2 if a rank reported success."""
    for number in range(1, 99):
        root = begin(f"{call}-{number}")
        codes, _, _ = run(body, root, f"--inject={call}:signal=KILL:when={number}")
        check(root, codes)
        if KILLED not in codes:
            break
        assert set(codes) <= {KILLED, LEFT_ALONE, 0}
    assert 1 < number < 99


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("body", [save, write] if SOAK else [save])
def test_an_error_at_any_call_is_reported_and_leaves_a_checkpoint(begin, body, call, error) -> None:
    """Oracle: the whole state of step 1 or 2; no rank crashes, and all ranks have the same text."""
    for number in range(1, 99):
        root = begin(f"{call}-{number}")
        codes, refusals, log = run(body, root, f"--inject={call}:error={error}:when={number}")
        check(root, codes)
        assert codes in ([0, 0], [REFUSED, REFUSED])
        if codes == [REFUSED, REFUSED]:
            assert refusals[0] == refusals[1]
            assert re.search(rf"{root}/.*bytes needed, [\d,]+ free", refusals[0])
            assert call in ("unlinkat", "rmdir") or not list(root.glob(".*.partial"))
        if "INJECTED" not in log:
            break
    assert 1 < number < 99


@pytest.mark.parametrize("body", [save, write])
def test_the_order_of_calls(begin, body) -> None:
    """Oracle: files, then manifest, directory, directory's name and parent; then deletion."""
    root = begin("order")
    codes, _, log = run(body, root)
    assert codes == [0, 0]
    calls = re.sub(rf"\d+<{root.parent}/|\"{root.parent}/", "", log)

    def at(pattern: str, last: bool = False) -> int:
        found = [match.start() for match in re.finditer(pattern, calls)]
        return found[-1 if last else 0]

    new = r"checkpoints/\.step-000000002\.partial"
    synced = [
        max(at(rf"fsync\({new}/shard-{rank}\.h5>") for rank in range(2)),
        at(rf"write\({new}/manifest\.json>"),
        at(rf"fsync\({new}/manifest\.json>"),
        at(rf"fsync\({new}>"),
        at(rf"rename\({new}\", checkpoints/step-000000002\""),
        at(r"fsync\(checkpoints>"),
        at(r"rename\(checkpoints/step-000000001\""),
        at(r"unlinkat\("),
    ]
    assert synced == sorted(synced)
    assert all(at(rf"write\({new}/shard-{rank}\.h5>", last=True) < synced[0] for rank in range(2))
