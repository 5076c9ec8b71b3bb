from __future__ import annotations

import pytest
import yaml

import mpikfac
from support import problem
from support.launch import run_each
from support.outlive import outlive
from support.problem import SETTINGS, network, run, sgd


@pytest.fixture(autouse=True)
def mpi_goes_on(monkeypatch):
    outlive(monkeypatch)


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Return the directory of the training runs that the test module's `runs` names.

    `runs(root)` yields the ranks and the options of each run; runs lie in directories of `root`.
    """
    root = tmp_path_factory.mktemp("runs")
    run_each(list(request.module.runs(root)), root)
    return root


@pytest.fixture
def trained(tmp_path):
    """Return K-FAC after a few steps; the state is saved in a run directory, `tmp_path / "run"`."""
    model, comm = network(), mpikfac.world()
    kfac = problem.kfac(model, sgd(model), comm, **SETTINGS)
    run(kfac, comm)
    root = tmp_path / "run"
    mpikfac.save_checkpoint(comm, root / "checkpoints", kfac.state_dict(), kfac.steps)
    settings = {key: SETTINGS[key] for key in ("preconditioner", "damping")}
    (root / "config.yaml").write_text(yaml.safe_dump({"kfac": settings}))
    return kfac
