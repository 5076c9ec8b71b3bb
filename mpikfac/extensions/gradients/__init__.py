"""How gradients are made and sent, beside the ways of a default step."""

from __future__ import annotations

from mpikfac.extensions.gradients.feedback import DirectFeedback as DirectFeedback
from mpikfac.extensions.gradients.largest import GentleStart as GentleStart
