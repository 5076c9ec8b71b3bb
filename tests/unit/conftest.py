from __future__ import annotations

import pytest

import mpikfac


@pytest.fixture
def comm():
    """Return a communicator of a single rank."""
    return mpikfac.world()
