"""How a rank sends its gradients, beside the ways of a default step."""

from __future__ import annotations

from mpikfac.extensions.gradients.largest import GentleStart as GentleStart
