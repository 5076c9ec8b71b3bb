"""Copies of the model: when copies differ, and how an exchange changes the copies."""

from __future__ import annotations

from mpikfac.extensions.copies.copies import Copies as Copies
