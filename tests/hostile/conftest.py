from __future__ import annotations

import pytest

from support.outlive import outlive


@pytest.fixture(autouse=True)
def mpi_goes_on(monkeypatch):
    outlive(monkeypatch)
