"""Full, read-only, forbidden or removed disks: one clear line, and training can go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import mpikfac
from mpikfac import CheckpointWriter, UserError, find_checkpoint, save_checkpoint
from support.forked import FORK, Comm, start

pytestmark = [pytest.mark.slow, pytest.mark.gate]

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
PAGE = 4096
DISK = 1 << 20


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return 130 kB in small and larger items, because HDF5 itself buffers small items."""
    small = {f"bias/{rank}.{n}": torch.full((n,), float(step)) for n in range(40)}
    return small | {f"factors/{rank}": torch.full((15_000,), float(step))}


@pytest.fixture
def disk(tmp_path):
    """Return the path of a file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "mpikfac-test", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def leave(disk: Path, free: int) -> None:
    """Fill the file system up to `free` bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    with open(filler, "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free - free))


def refusal(save) -> str:
    with pytest.raises(UserError) as refused:
        save()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def check(root: Path, step: int) -> None:
    found = find_checkpoint(mpikfac.world(), root)
    assert found is not None and found.step == step
    assert all(value.eq(step).all() for value in found.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk(disk, ranks) -> None:
    """Oracle: the new checkpoint or the checkpoint before; the text has path, cause and bytes.

    No rank crashes. The free bytes are swept from none to enough for the checkpoint.
    """
    root = disk / "checkpoints"
    enough = 140_000 * ranks // PAGE + 4
    sizes = [round(k * enough / 64) * PAGE for k in range(0, 65, 1 if SOAK else 8)]
    failures = 0
    for free in sizes:
        shutil.rmtree(root, ignore_errors=True)
        (disk / "filler").unlink(missing_ok=True)
        texts = [FORK.Array("c", 2000, lock=False) for _ in range(ranks)]

        def job(comm: Comm) -> None:
            save_checkpoint(comm, root, state(1, comm.rank), 1)
            if comm.rank == 0:
                leave(disk, free)  # noqa: B023
            comm.bcast(None)
            try:
                save_checkpoint(comm, root, state(2, comm.rank), 2)
            except UserError as error:
                texts[comm.rank].value = str(error).encode()  # noqa: B023

        processes = start(ranks, job)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * ranks
        found = {text.value.decode() for text in texts}
        assert len(found) == 1
        text = found.pop()
        failures += bool(text)
        check(root, 1 if text else 2)
        if text:
            assert "No space left on device" in text and str(root / ".step-000000002") in text
            assert f"bytes needed, {free:,} free" in text
            assert os.listdir(root) == ["step-000000001"]
    assert 0 < failures < len(sizes)


def test_a_run_goes_on_and_saves_again_when_there_is_room(disk) -> None:
    """Oracle: step 1 while the disk is full, step 3 afterwards; the failure is known at commit."""
    comm, root = mpikfac.world(), disk / "checkpoints"
    writer = CheckpointWriter(comm, root)
    writer.begin(state(1, 0), 1)
    assert writer.commit() is not None
    leave(disk, 10 * PAGE)
    writer.begin(state(2, 0), 2)
    assert "No space left on device" in refusal(writer.commit)
    assert not writer.pending and writer.commit() is None
    check(root, 1)
    (disk / "filler").unlink()
    writer.begin(state(3, 0), 3)
    writer.commit()
    check(root, 3)


def test_a_read_only_disk(disk) -> None:
    """Oracle: the system's own refusal, in one line; the older checkpoint."""
    comm, root = mpikfac.world(), disk / "checkpoints"
    save_checkpoint(comm, root, state(1, 0), 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    text = refusal(lambda: save_checkpoint(comm, root, state(2, 0), 2))
    assert "Read-only file system" in text and str(root) in text and "bytes needed" in text
    check(root, 1)


def test_a_directory_that_may_not_be_written() -> None:
    """Oracle: the system's own refusal, in one line, to a user that is not root."""
    text = FORK.Array("c", 2000, lock=False)

    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "checkpoints"
        os.chmod(place, 0o555)

        def job(comm: Comm) -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            text.value = refusal(lambda: save_checkpoint(comm, root, state(2, 0), 2)).encode()

        (process,) = start(1, job)
        process.join()
        os.chmod(place, 0o755)
    assert process.exitcode == 0
    assert f"Permission denied: '{root}'" in text.value.decode()


def test_a_directory_that_is_removed_meanwhile(tmp_path) -> None:
    """Oracle: the path in one line; the next checkpoint makes the directory anew."""
    comm, root = mpikfac.world(), tmp_path / "checkpoints"
    writer = CheckpointWriter(comm, root)
    writer.begin(state(1, 0), 1)
    while not writer.written:
        pass
    shutil.rmtree(root)
    assert str(root / ".step-000000001.partial") in refusal(writer.commit)
    writer.begin(state(2, 0), 2)
    writer.commit()
    check(root, 2)
