"""Encode values in fewer bytes, and combine vectors so that faulty ranks do little harm."""

from mpikfac.numerics.messages.codecs import add_decoded as add_decoded
from mpikfac.numerics.messages.codecs import encode as encode
from mpikfac.numerics.messages.codecs import matrix_in as matrix_in
from mpikfac.numerics.messages.codecs import orthonormal as orthonormal
from mpikfac.numerics.messages.codecs import renewed as renewed
from mpikfac.numerics.messages.robust import centered_clipping as centered_clipping
from mpikfac.numerics.messages.robust import combined as combined
from mpikfac.numerics.messages.robust import farthest as farthest
from mpikfac.numerics.messages.robust import geometric_median as geometric_median
from mpikfac.numerics.messages.robust import krum as krum
from mpikfac.numerics.messages.robust import median as median
from mpikfac.numerics.messages.robust import near_most as near_most
from mpikfac.numerics.messages.robust import trimmed_mean as trimmed_mean
from mpikfac.numerics.messages.shards import ByVector as ByVector
from mpikfac.numerics.messages.shards import Centred as Centred
from mpikfac.numerics.messages.shards import Near as Near
from mpikfac.numerics.messages.shards import Windows as Windows
from mpikfac.numerics.messages.shards import by_vector as by_vector
