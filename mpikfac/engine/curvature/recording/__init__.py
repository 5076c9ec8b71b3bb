"""Record a batch's moments: at once, or of many layers together."""

from mpikfac.engine.curvature.recording.recorder import Recorder as Recorder
from mpikfac.engine.curvature.recording.together import Together as Together
