"""Predict the step times of a plan on a machine."""

from mpikfac.predict.costs import algorithm_seconds as algorithm_seconds
from mpikfac.predict.costs import level_of as level_of
from mpikfac.predict.machine import Level as Level
from mpikfac.predict.machine import Machine as Machine
from mpikfac.predict.machine import Network as Network
from mpikfac.predict.machine import Sample as Sample
from mpikfac.predict.machine import load_machine as load_machine
from mpikfac.predict.machine import published_machines as published_machines
from mpikfac.predict.prediction import Clients as Clients
from mpikfac.predict.prediction import Job as Job
from mpikfac.predict.prediction import Prediction as Prediction
from mpikfac.predict.prediction import Step as Step
from mpikfac.predict.simulator import cheapest as cheapest
from mpikfac.predict.simulator import memory as memory
from mpikfac.predict.simulator import shares as shares
from mpikfac.predict.simulator import simulate as simulate
from mpikfac.predict.tensor_parallel import (
    choose_tensor_parallel_plan as choose_tensor_parallel_plan,
)
from mpikfac.predict.tensor_parallel import tensor_parallel_seconds as tensor_parallel_seconds
from mpikfac.predict.tuning import choose as choose
from mpikfac.predict.tuning import tuned as tuned
