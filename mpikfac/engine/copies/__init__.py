"""Copies of the model: when copies differ, and how an exchange changes the copies."""

from __future__ import annotations

from mpikfac.engine.copies.replicas import Replicas, of_copies

__all__ = ["Replicas", "of_copies"]
