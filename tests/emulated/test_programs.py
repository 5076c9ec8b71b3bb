"""The training program, the checkpoints and `calibrate` on the emulated device."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from support import problem
from support.launch import TRAIN, launch, run_each

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)

CALIBRATE = ("-m", "mpikfac_apps", "calibrate")
# Orthogonal directions, the default, enlarge differences of rounding.
PLAIN = ["--optimizer", "kfac", "--epochs", "2", "--kfac.grafting.orthogonalize", "false"]
STRATEGIES = {
    "plain": [],
    "sharded-optimizer": ["--strategy", "sharded-optimizer", "--kfac.preconditioner", "eigen"],
    "overlapped": ["--strategy", "spd-kfac"],
    "curvature servers": ["--strategy", "curvature-servers", "--refresh.servers", "1"],
    "averaged in parts": ["--transport.virtual_ranks", "2"],
}
MOVES = [(2, "cuda", "cpu"), (1, "cpu", "cuda"), (1, "cuda", "cuda")]


@pytest.fixture
def comm():
    return mpikfac.world()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the folder of the runs: each strategy on both devices, and runs that go on."""
    root = tmp_path_factory.mktemp("runs")
    runs = [
        (2, [*PLAIN, *options, "--device", device, "--run_dir", str(root / f"{name}-{device}")])
        for name, options in STRATEGIES.items()
        for device in ("cpu", "cuda")
    ]
    for ranks, first, then in MOVES:
        run_dir = str(root / f"{first}, then {then} on {ranks}")
        begun = [*PLAIN, "--run_dir", run_dir, "--device", first, "--max_steps", "5"]
        runs.append((2, [*begun, "--trace_steps", "2"]))
        runs.append((ranks, [*PLAIN, "--run_dir", run_dir, "--device", then, "--resume", "auto"]))
    run_each(runs, root)
    return root


def losses(run) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["test_loss"] for line in lines if "test_loss" in line]


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_the_cpu(job, name):
    """Oracle: the same run on the CPU, to the rounding of float32."""
    found, expected = losses(job / f"{name}-cuda"), losses(job / f"{name}-cpu")
    assert len(found) == 2 and found == pytest.approx(expected, rel=1e-3)
    environment = json.loads((job / f"{name}-cuda" / "environment.json").read_text())
    assert environment["device"] == "emulated device"


@pytest.mark.parametrize(("ranks", "first", "then"), MOVES)
def test_a_run_goes_on_with_another_device_and_number_of_ranks(job, ranks, first, then):
    """Oracle: the run on the CPU that was not interrupted, to the rounding of float32."""
    run = job / f"{first}, then {then} on {ranks}"
    assert losses(run)[-1] == pytest.approx(losses(job / "plain-cpu")[-1], rel=1e-3)
    stages = json.loads((run / "stages.json").read_text())
    assert "precondition" in str(stages)


def test_ranks_take_devices_in_turn_and_share_them():
    """Oracle: by hand: 3 ranks on 2 devices."""
    text = "import mpikfac; c = mpikfac.world(); print(c.allgather(str(mpikfac.device(c))))"
    ran = launch(3, "-c", text, env={"EMULATED_DEVICES": "2"})
    assert ran.stdout.splitlines() == ["['cuda:0', 'cuda:1', 'cuda:0']"] * 3, ran.stderr


def test_training_on_two_devices_is_that_on_one(job, tmp_path):
    """Oracle: the run on a single device."""
    options = [*PLAIN, "--device", "cuda", "--run_dir", str(tmp_path / "run")]
    ran = launch(2, *TRAIN, *options, env={"EMULATED_DEVICES": "2"})
    assert ran.returncode == 0, ran.stderr
    assert losses(tmp_path / "run") == losses(job / "plain-cuda")


def test_too_little_memory_ends_the_job_with_a_line():
    """Oracle: the line names the rank, the activity and the device."""
    options = ["--optimizer", "kfac", "--model", "resnet20", "--device", "cuda", "--epochs", "1"]
    ran = launch(2, *TRAIN, *options, env={"EMULATED_BYTES": "20000000"})
    assert ran.returncode == 1
    assert re.search(r"mpikfac: rank \d of 2, .*OutOfMemoryError: CUDA out of memory", ran.stderr)


def test_a_step_that_found_too_little_memory_leaves_the_state_as_it_was(comm):
    """Oracle: the run whose steps always found enough, to the last bit."""

    def trained(fails):
        model = problem.network().to("cuda")
        kfac = problem.kfac(model, problem.sgd(model), comm, **problem.SETTINGS)
        for step in range(problem.STEPS):
            images, labels = (part.to("cuda") for part in problem.batch(step))
            for full in [True, False] if fails else [False]:
                kfac.optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                if full:
                    ballast = filled()
                    with pytest.raises(torch.OutOfMemoryError):
                        kfac.step()
                    ballast.clear()
                    kfac.clear_statistics()
                else:
                    kfac.step()
        return problem.state(model)

    assert torch.equal(trained(fails=True), trained(fails=False))


def filled() -> list[torch.Tensor]:
    """Return tensors that take all memory of the device."""
    ballast, size = [], 2**32
    while size > 64:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return ballast


@pytest.mark.slow
def test_a_device_is_measured(tmp_path):
    """Oracle: the file tells how messages went."""
    for direct, way in (("0", "staged"), ("1", "direct")):
        file = tmp_path / f"{way}.json"
        options = ["--out", str(file), "--model", "digits_cnn", "--batch_per_rank", "4"]
        ran = launch(2, *CALIBRATE, *options, env={"MPIKFAC_CUDA_AWARE": direct})
        assert ran.returncode == 0, ran.stderr
        machine = mpikfac.predict.load_machine(str(file))
        assert machine.about["device buffers"] == way
