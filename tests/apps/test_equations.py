"""`mpikfac equations`: problems, their residuals, optimizers, and what the program prints."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import grad, hessian, vmap

import mpikfac
from mpikfac_apps.lab.equations import equations
from mpikfac_apps.lab.equations.optimizers import OPTIMIZERS, stepper
from mpikfac_apps.lab.equations.problems import PROBLEMS
from mpikfac_apps.lab.equations.task import Derivatives, EquationTask, by_jets, by_passes, grid
from support.launch import launch

pytestmark = pytest.mark.lab

SMALL = ["--points=12", "--width=6", "--seconds=0.001"]


@pytest.fixture(autouse=True)
def _no_end(monkeypatch):
    monkeypatch.setattr("mpikfac.comm.mpi.MPI.Finalize", lambda: None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_exact_solution_solves_the_equation(name):
    """Oracle: derivatives of the solution by `torch.func`."""
    problem, points = PROBLEMS[name], grid()[::37]
    of_point = lambda p: problem.exact(p[None])[0]  # noqa: E731
    second = vmap(hessian(of_point))(points).diagonal(dim1=1, dim2=2)
    exact = Derivatives(problem.exact(points), vmap(grad(of_point))(points), second)
    coefficients = torch.tensor(problem.coefficients, dtype=torch.float64)
    residual = problem.residual(exact, points, coefficients)
    torch.testing.assert_close(residual, torch.zeros_like(residual), rtol=0, atol=1e-12)
    other = problem.residual(exact._replace(second=second + 1), points, coefficients)
    assert other.abs().max() > 1e-3


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_backward_mode_have_the_same_loss(name):
    """Oracle: double backward; and the loss from its definition, for two ranks together."""
    task = EquationTask(PROBLEMS[name], 13, 6, seed=0)
    loss = task.loss(by_jets)
    torch.testing.assert_close(loss, task.loss(by_passes), rtol=1e-12, atol=0)
    whole = torch.stack(
        [part.residual(task.model, part.points).square().mean() for part in task.terms]
    )
    weights = torch.tensor([task.equation.weight, 1.0], dtype=torch.float64)
    torch.testing.assert_close(loss, whole @ weights / 2, rtol=1e-12, atol=0)
    parts = [EquationTask(PROBLEMS[name], 13, 6, 0, rank, 2).loss() for rank in (0, 1)]
    torch.testing.assert_close(loss, sum(parts), rtol=1e-12, atol=0)
    assert task.tested_loss() == loss.item() and task.model.training


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_reduce_the_loss(name):
    """Oracle: the loss before; the inverse problem has parameters outside of the network."""
    task = EquationTask(PROBLEMS["inverse"], 24, 8, seed=0)
    before, start = task.tested_loss(), task.coefficients.detach().clone()
    step = stepper(name, task, None, mpikfac.world())
    for number in range(8):
        step(number / 8)
    assert task.tested_loss() < before and not torch.equal(task.coefficients, start)


def test_sample_space_finds_the_solution_and_the_coefficients():
    """Oracle: the exact solution and coefficients of the inverse problem."""
    task = EquationTask(PROBLEMS["inverse"], 150, 12, seed=0)
    step = stepper("sample-space", task, None, mpikfac.world())
    for _ in range(60):
        step(0.0)
    assert task.error() < 0.05
    exact = torch.tensor(task.equation.coefficients).double()
    torch.testing.assert_close(task.coefficients.detach(), exact, rtol=0.05, atol=0)


def test_the_program_prints_its_progress_and_draws(capsys, tmp_path):
    """Oracle: ten lines, at least one step, and a picture."""
    picture = tmp_path / "solution.svg"
    assert equations.main([*SMALL, "--problem=inverse", f"--picture={picture}"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "-a u_xx - b u_yy = f; 12 points, 64 values, 109 weights"
    assert head.split() == ["seconds", "steps", "loss", "L2", "error"]
    assert len(lines) == 10 and all(len(line.split()) == 6 for line in lines)
    assert int(lines[-1].split()[1]) >= 1
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate=1"], "rate=1 must be null: sample-space has no learning rate"),
        (["--points=4"], "points"),
        (["--points=7000"], "--points 7000 and 2331 given values are too many for sample-space"),
        (["--picture=x.txt"], "must end in"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, arguments, words):
    """Oracle: exit code 2 and a single line."""
    with pytest.raises(SystemExit) as left:
        equations.main([*SMALL, *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and words in line


@pytest.mark.gate
def test_ranks_share_the_points():
    """Oracle: exit codes; other optimizers than sample-space refuse several ranks in one line."""
    ended = launch(2, "-m", "mpikfac_apps", "equations", *SMALL)
    assert ended.returncode == 0 and len(ended.stdout.splitlines()) == 12, ended.stderr
    ended = launch(2, "-m", "mpikfac_apps", "equations", *SMALL, "--optimizer=adam")
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("mpikfac")]
    assert re.search("optimizer=adam runs on one rank, not 2; use optimizer=sample-space", line)
