"""Record the moments of a batch; hooks decide which passes count."""

from mpikfac.engine.curvature.recording.deferred import DeferredMoments as DeferredMoments
from mpikfac.engine.curvature.recording.hooks import RecordingHooks as RecordingHooks
from mpikfac.engine.curvature.recording.moments import Moments as Moments
