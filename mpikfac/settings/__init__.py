"""The hyperparameters and choices of K-FAC, as objects that validate their values."""

from mpikfac.settings.budget import Budget as Budget
from mpikfac.settings.budget import budget_of as budget_of
from mpikfac.settings.budget import cost as cost
from mpikfac.settings.budget import seen_in as seen_in
from mpikfac.settings.combinations import SETTINGS as SETTINGS
from mpikfac.settings.damping import Damping as Damping
from mpikfac.settings.damping import LevenbergMarquardt as LevenbergMarquardt
from mpikfac.settings.estimator import Estimator as Estimator
from mpikfac.settings.estimator import Subsample as Subsample
from mpikfac.settings.estimator import Turn as Turn
from mpikfac.settings.estimator import usual_distance as usual_distance
from mpikfac.settings.schedule import SETTLED as SETTLED
from mpikfac.settings.schedule import Schedule as Schedule
from mpikfac.settings.schedule import evaluate as evaluate
from mpikfac.settings.schedule import in_force as in_force
from mpikfac.settings.settings import PRECISIONS as PRECISIONS
from mpikfac.settings.settings import Numbers as Numbers
from mpikfac.settings.settings import Precision as Precision
from mpikfac.settings.settings import Settings as Settings
from mpikfac.settings.usual import MOMENTUM as MOMENTUM
from mpikfac.settings.usual import RATE as RATE
from mpikfac.settings.usual import SHARE as SHARE
from mpikfac.settings.usual import WEIGHT_DECAY as WEIGHT_DECAY
from mpikfac.settings.usual import Intervals as Intervals
from mpikfac.settings.usual import usual_intervals as usual_intervals
