"""Encode values in fewer bytes, and aggregate vectors so that faulty ranks do little harm."""

from mpikfac.numerics.messages.aggregation import ByVector as ByVector
from mpikfac.numerics.messages.aggregation import by_vector as by_vector
from mpikfac.numerics.messages.aggregation import combined as combined
from mpikfac.numerics.messages.codecs import encode as encode
