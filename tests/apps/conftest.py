from __future__ import annotations

import signal

import pytest
import yaml
from problem import SETTINGS, network, run, sgd

import mpikfac
from mpikfac_apps.asked import SIGNALS


@pytest.fixture(autouse=True)
def former_signals():
    """A run that is complete ignores signals, and so would all that a later test starts."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def trained(tmp_path):
    """K-FAC after a few steps, whose state lies in a run directory, `tmp_path / "run"`."""
    model, comm = network(), mpikfac.world()
    kfac = mpikfac.KFAC(model, sgd(model), comm, **SETTINGS)
    run(kfac, comm)
    root = tmp_path / "run"
    mpikfac.save_checkpoint(comm, root / "checkpoints", kfac.state_dict(), kfac.steps)
    settings = {key: SETTINGS[key] for key in ("solver", "damping")}
    (root / "config.yaml").write_text(yaml.safe_dump({"kfac": settings}))
    return kfac
