from __future__ import annotations

import pytest

import mpikfac


@pytest.fixture
def comm():
    """A communicator of one rank."""
    return mpikfac.world()
