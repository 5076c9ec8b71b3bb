"""The laboratory: methods of papers beside the core, one folder a method.

Import it to know its methods by name: types of `Strategy`, and named strategies.

    import mpikfac.lab
    strategy, settings = mpikfac.get_strategy("parle")

The core imports nothing of it. It promises no stability.
"""

from mpikfac.lab import catalogue as catalogue
from mpikfac.lab.curvature_servers.config import CurvatureServers as CurvatureServers
from mpikfac.lab.local_sgd.config import DASO as DASO
from mpikfac.lab.local_sgd.config import DiLoCo as DiLoCo
from mpikfac.lab.local_sgd.config import LocalSGD as LocalSGD
from mpikfac.lab.local_sgd.config import Replicas as Replicas
from mpikfac.lab.lsgd.config import LSGD as LSGD
from mpikfac.lab.parameter_server.config import ParameterServer as ParameterServer
from mpikfac.lab.parle.config import Parle as Parle
from mpikfac.lab.power_sgd.config import PowerSGD as PowerSGD
from mpikfac.lab.quadratic_model.config import QuadraticModel as QuadraticModel
from mpikfac.lab.robust.config import CenteredClipping as CenteredClipping
from mpikfac.lab.robust.config import GeometricMedian as GeometricMedian
from mpikfac.lab.robust.config import Krum as Krum
from mpikfac.lab.robust.config import Median as Median
from mpikfac.lab.robust.config import NearestMajority as NearestMajority
from mpikfac.lab.robust.config import Safeguard as Safeguard
from mpikfac.lab.robust.config import TrimmedMean as TrimmedMean
from mpikfac.lab.top_k.config import TopK as TopK
