from __future__ import annotations

import logging
import shutil

import pytest

import mpikfac
from mpikfac import find_checkpoint, save_checkpoint
from mpikfac.checkpoint import note_end, note_start


@pytest.fixture
def root(tmp_path):
    """Return a directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(mpikfac.world(), tmp_path, {"x": step}, step)
    return tmp_path


def begin(root) -> int:
    """Note a start; return the step of the start's checkpoint."""
    found = find_checkpoint(mpikfac.world(), root)
    note_start(found)
    return found.step


def test_the_third_start_takes_the_checkpoint_before(root, caplog) -> None:
    """Oracle: by hand; after failed starts from all checkpoints, the newest again."""
    assert [begin(root), begin(root)] == [2, 2] and not caplog.records
    assert begin(root) == 1
    assert [record.message for record in caplog.records] == [
        f"{root}/step-000000002: the last 2 starts from it committed no newer checkpoint; "
        f"continuing from {root}/step-000000001"
    ]
    assert begin(root) == 1
    caplog.clear()
    assert begin(root) == 2
    assert len(caplog.records) == 2 and caplog.records[0].levelno == logging.WARNING


def test_a_newer_checkpoint_is_taken(root) -> None:
    """Oracle: by hand."""
    assert [begin(root), begin(root)] == [2, 2]
    save_checkpoint(mpikfac.world(), root, {"x": 3}, 3, keep=9)
    assert [begin(root), begin(root), begin(root)] == [3, 3, 2]


def test_an_orderly_end_forgets_the_starts(root) -> None:
    """Oracle: by hand."""
    assert [begin(root), begin(root)] == [2, 2]
    note_end(root)
    note_end(root)
    assert [begin(root), begin(root), begin(root)] == [2, 2, 1]


def test_starts_that_led_to_a_newer_checkpoint_do_not_count(root) -> None:
    """Oracle: by hand. The start from step 2 wrote step 3; step 3 is lost later."""
    assert begin(root) == 2
    path = save_checkpoint(mpikfac.world(), root, {"x": 3}, 3, keep=9)
    assert begin(root) == 3
    shutil.rmtree(path)
    assert [begin(root), begin(root), begin(root)] == [2, 2, 1]


def test_a_run_that_went_back_gets_beyond_the_bad_checkpoint(root) -> None:
    """Oracle: by hand. Step 2 is bad until a run writes step 2 again with other content."""
    assert [begin(root), begin(root), begin(root)] == [2, 2, 1]
    save_checkpoint(mpikfac.world(), root, {"x": 2, "y": "new"}, 2)
    assert begin(root) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "3", '[{"step": 2}]', "[1]", '{"a": 1}', '[{"step": 1, "digest": [], "starts": 9}]'],
)
def test_a_damaged_record_counts_as_none(root, content) -> None:
    """Oracle: by hand."""
    (root / "starts.json").write_text(content)
    assert [begin(root), begin(root), begin(root)] == [2, 2, 1]


def test_a_record_that_cannot_be_written_is_a_warning(root, monkeypatch, caplog) -> None:
    """Oracle: the start goes on."""

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("mpikfac.checkpoint.durable.replace", full)
    assert begin(root) == 2
    assert "this start is not counted: No space left on device" in caplog.text
