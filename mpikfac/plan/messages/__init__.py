"""Messages as plain data: in one level, in two levels, and through equal shards."""

from mpikfac.plan.messages.levels import BETWEEN_NODES as BETWEEN_NODES
from mpikfac.plan.messages.levels import IN_NODE as IN_NODE
from mpikfac.plan.messages.levels import Seat as Seat
from mpikfac.plan.messages.levels import in_two_levels as in_two_levels
from mpikfac.plan.messages.levels import seat as seat
from mpikfac.plan.messages.messages import BATCH as BATCH
from mpikfac.plan.messages.messages import PIECE as PIECE
from mpikfac.plan.messages.messages import Message as Message
from mpikfac.plan.messages.messages import across as across
from mpikfac.plan.messages.messages import combinations as combinations
from mpikfac.plan.messages.messages import gathers as gathers
from mpikfac.plan.messages.messages import in_order as in_order
from mpikfac.plan.messages.messages import message as message
from mpikfac.plan.messages.messages import rows as rows
from mpikfac.plan.messages.messages import shard_length as shard_length
from mpikfac.plan.messages.messages import sums as sums
from mpikfac.plan.messages.shards import PASSED as PASSED
from mpikfac.plan.messages.shards import Passed as Passed
from mpikfac.plan.messages.shards import in_shards as in_shards
from mpikfac.plan.messages.shards import passed as passed
