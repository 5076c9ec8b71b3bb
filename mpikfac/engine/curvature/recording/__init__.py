"""Record a batch's moments: hooks decide which passes count, and moments are what they add."""

from mpikfac.engine.curvature.recording.deferred import DeferredMoments as DeferredMoments
from mpikfac.engine.curvature.recording.hooks import RecordingHooks as RecordingHooks
from mpikfac.engine.curvature.recording.moments import Moments as Moments
