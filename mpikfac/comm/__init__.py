"""Communicate between ranks; no other package of mpikfac imports mpi4py.

Training uses blocking collectives, because Open MPI makes progress on non-blocking ones only inside
MPI calls. Overlapped messages, and messages to and from curvature servers, are non-blocking.
"""

from mpikfac.comm.agreement import agree as agree
from mpikfac.comm.agreement import broadcast as broadcast
from mpikfac.comm.agreement import clock_offset as clock_offset
from mpikfac.comm.agreement import handed_over as handed_over
from mpikfac.comm.agreement import summed as summed
from mpikfac.comm.agreement import together as together
from mpikfac.comm.curvature_servers import LEAVING as LEAVING
from mpikfac.comm.curvature_servers import SplitComm as SplitComm
from mpikfac.comm.curvature_servers import announce as announce
from mpikfac.comm.curvature_servers import announced as announced
from mpikfac.comm.curvature_servers import arrivals as arrivals
from mpikfac.comm.curvature_servers import begin_receive as begin_receive
from mpikfac.comm.curvature_servers import begin_send as begin_send
from mpikfac.comm.curvature_servers import leave as leave
from mpikfac.comm.curvature_servers import split_comm as split_comm
from mpikfac.comm.grid import Grid as Grid
from mpikfac.comm.group import Group as Group
from mpikfac.comm.isolated import isolated_seconds as isolated_seconds
from mpikfac.comm.job import Comm as Comm
from mpikfac.comm.job import check_connected as check_connected
from mpikfac.comm.job import check_survivable as check_survivable
from mpikfac.comm.job import cuda_aware as cuda_aware
from mpikfac.comm.job import device as device
from mpikfac.comm.job import leaving as leaving
from mpikfac.comm.job import lost_a_rank as lost_a_rank
from mpikfac.comm.job import lowest_in_node as lowest_in_node
from mpikfac.comm.job import survivors as survivors
from mpikfac.comm.job import tells_of_loss as tells_of_loss
from mpikfac.comm.job import world as world
from mpikfac.comm.messages import MAX_COUNT as MAX_COUNT
from mpikfac.comm.messages import SUMMABLE as SUMMABLE
from mpikfac.comm.messages import InOrder as InOrder
from mpikfac.comm.messages import Overlapped as Overlapped
from mpikfac.comm.messages import Sender as Sender
from mpikfac.comm.messages import Turns as Turns
from mpikfac.comm.mpi import TORCHRUN as TORCHRUN
from mpikfac.comm.process_group import over as over
from mpikfac.comm.servers import FETCH as FETCH
from mpikfac.comm.servers import GIVE as GIVE
from mpikfac.comm.servers import HOLD as HOLD
from mpikfac.comm.servers import LOAD as LOAD
from mpikfac.comm.servers import MEET as MEET
from mpikfac.comm.servers import PUSH as PUSH
from mpikfac.comm.servers import SAVE as SAVE
from mpikfac.comm.servers import Answer as Answer
from mpikfac.comm.servers import Request as Request
from mpikfac.comm.servers import answer as answer
from mpikfac.comm.servers import ask as ask
from mpikfac.comm.servers import joined as joined
from mpikfac.comm.servers import look as look
from mpikfac.comm.servers import lost_ranks as lost_ranks
from mpikfac.comm.servers import receive_items as receive_items
from mpikfac.comm.servers import receive_request as receive_request
from mpikfac.comm.servers import send_items as send_items
from mpikfac.comm.watch import WatchedSteps as WatchedSteps
