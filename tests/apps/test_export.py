"""Exported items equal trained items, and files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mpikfac
from mpikfac_apps.inspecting import export
from support import inside
from support.problem import network


def check_same_output(model, weights):
    """Check that the network with the weights computes the outputs of `model`."""
    rebuilt = network()
    rebuilt.load_state_dict(weights)
    images = torch.randn(7, 2, 8, 8, dtype=torch.float64)
    assert torch.equal(rebuilt(images), model(images))


def test_weights_are_those_of_the_trained_model(trained, tmp_path):
    """Oracle: the outputs of the trained model, and the bytes of the model's tensors."""
    file = tmp_path / "new" / "model.pt"
    assert export.main([str(tmp_path / "run"), "--weights", str(file)]) == 0
    weights = torch.load(file, weights_only=True)
    check_same_output(trained.model, weights)
    sizes = [value.nbytes for value in trained.model.state_dict().values()]
    assert file.stat().st_size < sum(sizes) + 1000 * len(sizes)


def test_safetensors_are_those_of_the_trained_model(trained, tmp_path):
    """Oracle: the outputs of the trained model."""
    file = tmp_path / "model.safetensors"
    assert export.main([str(tmp_path / "run"), "--weights", str(file)]) == 0
    check_same_output(trained.model, load_file(file))


def test_factors_are_those_of_the_running_trainer(trained, tmp_path):
    """Oracle: K-FAC's running averages."""
    file = tmp_path / "factors.npz"
    assert export.main([str(tmp_path / "run"), "--factors", str(file)]) == 0
    with np.load(file) as arrays:
        found = dict(arrays)
    assert found.keys() == inside.factors(trained).keys()
    for name, packed in inside.factors(trained).items():
        assert np.array_equal(found[name], found[name].T)
        assert np.array_equal(found[name], mpikfac.numerics.unfold_triangle(packed).numpy())


def test_a_file_that_cannot_be_written_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    """Oracle: the directory's content."""

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.rglob("*"))
    assert export.main([str(tmp_path / "run"), "--weights", str(tmp_path / "model.pt")]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert "model.pt cannot be written: No space left on device" in capsys.readouterr().err


def test_something_in_the_way_is_one_error(tmp_path):
    """Oracle: the error that a run takes for a warning, if the best weights cannot be written."""
    (tmp_path / ".best.pt.partial").mkdir()
    with pytest.raises(ValueError, match="best.pt cannot be written: it is a directory, not a reg"):
        export.write(tmp_path / "best.pt", {"x": torch.zeros(1)})
    assert os.listdir(tmp_path) == [".best.pt.partial"]


def test_a_file_that_exists_is_kept(trained, tmp_path, capsys):
    """Oracle: the file's content, and no second file."""
    file = tmp_path / "model.pt"
    file.write_text("precious")
    other = tmp_path / "factors.npz"
    words = [str(tmp_path / "run"), "--factors", str(other), "--weights", str(file)]
    assert export.main(words) == 2
    assert file.read_text() == "precious"
    assert not other.exists()
    assert "model.pt exists; use another name or delete it" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path, capsys):
    """Oracle: a flipped bit of a shard."""
    (shard,) = tmp_path.rglob("shard-0.h5")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert export.main([str(tmp_path / "run"), "--weights", str(tmp_path / "model.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "shard-0.h5 is damaged" in line
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nothing --weights m.pt", "nothing contains no complete checkpoint"),
        ("run", "pass at least one of --weights FILE, --average FILE and --factors FILE"),
        ("run --weights m.pt --average m.pt", "weights and average need different files, not m.pt"),
        ("run --average m.pt", "has no averaged weights; its run had ema_decay=0"),
        ("run --weights m.bin", "m.bin must end in .pt or .safetensors"),
        ("run --factors f.npy", "f.npy must end in .npz"),
        ("run --weights m.safetensors", "needs the package safetensors"),
        ("run --optimizer o.pt", "unknown key optimizer"),
        ("first-order --factors f.npz", "has no factors"),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    mpikfac.save_checkpoint(mpikfac.world(), "first-order", {"model/w": torch.ones(2)}, 1)
    code = export.main(arguments.split())
    output = capsys.readouterr()
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert told in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-order", "run"]
