from __future__ import annotations

import time

import pytest

import mpikfac


def test_a_stage_adds_up_its_time_and_calls():
    """Oracle: the time slept."""
    trace = mpikfac.Trace()
    for _ in range(2):
        with trace.stage("decompose"):
            time.sleep(0.01)
    assert trace.calls["decompose"] == 2
    assert 0.02 <= trace.seconds["decompose"] < 1


def test_communication_is_the_stages_that_communicate():
    """Oracle: the sum by hand."""
    trace = mpikfac.Trace()
    trace.seconds |= dict.fromkeys([*mpikfac.COMMUNICATION, "decompose"], 2.0)
    assert trace.communication_seconds() == 2.0 * len(mpikfac.COMMUNICATION)


def test_clear_forgets():
    trace = mpikfac.Trace()
    with trace.stage("clip"):
        trace.sent["clip"] += 8
    trace.clear()
    assert not trace.seconds and not trace.calls and not trace.sent


def test_a_stage_that_fails_raises_what_failed():
    with pytest.raises(ZeroDivisionError), mpikfac.Trace().stage("decompose"):
        raise ZeroDivisionError
