"""Replay the messages of a plan in SimGrid's SMPI, which simulates MPI on a network.

A file contains the messages that all ranks send in a step, and tests/smpi/replay.c executes it.
Computation takes no time. Bytes and bandwidths are both divided by `SCALE`, so that the ranks of a
large job fit in memory; the times do not change. The algorithms are those that Open MPI chooses.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpikfac.plan import BATCH, PASSED, PIECE, Message, Plan, names
from mpikfac.predict import Machine, algorithms, costs, load_machine, simulator
from mpikfac_apps.lab.predict import predictions
from mpikfac_apps.lab.predict.options import SIMULATE

PROGRAM = Path(__file__).parents[1] / "smpi" / "replay.c"
SCALE = 256
WORD = 4  # bytes of an element of the C program
OF_PARTS = ("Reduce_scatter", "Allgatherv", "Alltoall")
IN_PARTS, ON_NODES = " in parts", " on nodes"  # suffixes of strategies: without shards, two levels
NAMES = {
    "Allreduce": {"doubling": "rdb", "rabenseifner": "rab_rdb", "ring": "lr"},
    "Reduce": {"binomial": "binomial", "linear": "flat_tree"},
    "Bcast": {
        **{"binomial": "binomial_tree", "linear": "flattree", "scatter": "scatter_rdb_allgather"},
        "knomial": "",
    },
    "Reduce_scatter": {
        **{"ring": "ompi_ring", "butterfly": "ompi_butterfly"},
        **{"pairwise": "mpich_pair", "halving": "ompi_basic_recursivehalving"},
    },
    "Allgatherv": {"ring": "", "neighbour": "ompi_neighborexchange", "bruck": "ompi_bruck"},
    "Alltoall": {"linear": "ompi_basic_linear", "pairwise": "ring"},
}
"""SMPI's names of algorithms, by primitive and by the names in `mpikfac.predict.algorithms`.

replay.c implements those without a name: SMPI's ring gathers send to far members, or in pieces.
"""

OPTIONS = {
    **{"smpi/bw-factor": "0:1", "smpi/lat-factor": "0:1", "network/TCP-gamma": 0},
    "network/weight-S": 1,  # flows share a link equally; with 0, some flows do not share it
    **{"smpi/os": "0:0:0", "smpi/or": "0:0:0", "smpi/simulate-computation": "no"},
    **{"smpi/display-timing": "no", "contexts/stack-size": 256, "network/crosstraffic": "no"},
    "smpi/send-is-detached-thresh": 2**16 // SCALE,
}


@dataclass(frozen=True)
class Call:
    """An MPI call of a team.

    Attributes:
        numbers: the call's arguments in the file; see replay.c.
        elements: the number of elements of each member's part, or of the buffer, before scaling.
    """

    numbers: tuple[int, ...]
    elements: tuple[int, ...]


@dataclass(frozen=True)
class Replayed:
    """A message as all ranks send it, with the calls of each team."""

    primitive: str
    algorithm: str
    teams: tuple[tuple[range, tuple[Call, ...]], ...]

    def text(self) -> str:
        """Return the message's lines in the file."""
        own = NAMES.get(self.primitive, {}).get(self.algorithm) == ""
        name = f"{self.primitive},{self.algorithm}" if own else self.primitive.replace(" ", "")
        lines = [f"{name} {len(self.teams)}"]
        for team, calls in self.teams:
            lines.append(f"{team.start} {team.step} {len(team)} {len(calls)}")
            lines += [" ".join(map(str, (len(c.numbers), *c.numbers))) for c in calls]
        return "\n".join(lines) + "\n"


def missing() -> str:
    """Return why nothing can be simulated; "" if SMPI is installed."""
    absent = [program for program in ("smpirun", "smpicc") if not shutil.which(program)]
    return f"no {' and no '.join(absent)} on PATH: install SimGrid with SMPI" if absent else ""


# -- messages of a plan ----------------------------------------------------------------------------


def replayed(plan: Plan, statistics: bool, refresh: bool) -> list[tuple[str, Replayed]]:
    """Return stage and message of a step's messages in order, with the teams of all ranks.

    Raises:
        ValueError: a message cannot be replayed.
    """
    stages: dict[tuple[object, ...], dict[range, Message]] = {}
    for rank in range(plan.ranks):
        seen: dict[tuple[str, str, str], int] = {}
        for message in plan.messages(rank, statistics, refresh):
            kind = message.stage, message.primitive, message.over
            seen[kind] = seen.get(kind, 0) + 1
            teams = stages.setdefault((*kind, seen[kind]), {})
            teams.setdefault(plan.grid.team(rank, message.over), message)
    messages = []
    for kind, teams in sorted(stages.items(), key=lambda e: names.IN_STEP.index(e[0][0])):
        messages.append((str(kind[0]), of_teams(plan, teams)))
    return messages


def of_teams(plan: Plan, teams: dict[range, Message]) -> Replayed:
    """Return the message of several teams, with the algorithm of the largest call."""
    calls = {team: calls_of(message, team, plan) for team, message in teams.items()}
    message = next(iter(teams.values()))
    team, largest = max(
        ((team, call) for team in teams for call in calls[team]),
        key=lambda entry: sum(entry[1].elements),
    )
    algorithm = "" if message.primitive == PASSED else chosen(message, largest, team, plan)
    return Replayed(message.primitive, algorithm, tuple((t, tuple(calls[t])) for t in teams))


def chosen(message: Message, call: Call, team: range, plan: Plan) -> str:
    """Return the algorithm that Open MPI chooses for a call."""
    primitive = "Iallreduce" if overlapped(message, plan) else message.primitive
    sizes: list[float] = [count * WORD for count in call.elements]
    if message.primitive not in OF_PARTS:
        sizes = [sizes[0] / len(team)] * len(team)
    return algorithms.chosen(primitive, sizes)


def overlapped(message: Message, plan: Plan) -> bool:
    """Return whether the message is sent during the computation."""
    stages = (names.REDUCE_GRADIENTS, names.REDUCE_STATISTICS)
    return plan.strategy.transport.overlap and message.stage in stages


def calls_of(message: Message, team: range, plan: Plan) -> list[Call]:
    """Return the MPI calls that carry out a message, in order.

    Raises:
        ValueError: the message is encoded, is combined by a rule, or is not a single collective.
    """
    if message.codec or message.rule or message.primitive not in (*NAMES, PASSED):
        raise ValueError(f"{message.primitive} of {message.stage!r} is not replayed")
    primitive, root = message.primitive, message.root
    if primitive == PASSED:
        moved = list(transfers(message.spans, message.to))
        elements = tuple(count for _, _, count in moved)
        words = message.size / sum(elements) / WORD
        triples = (n for source, to, count in moved for n in (source, to, scaled(count, words)))
        return [Call(tuple(triples), elements)]
    counts = [stop - start for start, stop in message.spans]
    words = message.size / sum(counts) / WORD
    piece = BATCH if overlapped(message, plan) else PIECE
    if primitive == "Bcast":
        piece = sum(counts)
    calls = []
    for parts in pieces(counts, piece, primitive):
        numbers = [scaled(count, words) for count in parts]
        rooted = [root] if primitive in ("Reduce", "Bcast") else []
        calls.append(Call((*rooted, *numbers), tuple(round(count * words) for count in parts)))
    return calls


def pieces(counts: Sequence[int], piece: int, primitive: str) -> Iterator[list[int]]:
    """Yield the elements of every part that each call sends.

    Reductions are cut into pieces of about `piece` elements; each piece contains the same fraction
    of every part. A gather is not cut.
    """
    if primitive == "Allgatherv":
        yield list(counts)
        return
    if primitive in OF_PARTS:
        number = -(-sum(counts) // piece)
        for turn in range(number):
            yield [n * (turn + 1) // number - n * turn // number for n in counts]
        return
    for start in range(0, counts[0], piece):
        yield [min(piece, counts[0] - start)]


def transfers(
    before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield source, destination and the elements that a member holds of another's new part."""
    for source, (start, stop) in enumerate(before):
        for to, (first, last) in enumerate(after):
            count = min(stop, last) - max(start, first)
            if count > 0 and source != to:
                yield source, to, count


def scaled(count: int, words: float) -> int:
    """Return the number of elements in the file; it is 0 only if `count` is 0."""
    return max(1, round(count * words / SCALE)) if count else 0


# -- the simulated machine -------------------------------------------------------------------------


def simulated(
    messages: Iterable[Replayed], machine: Machine, ranks: int, folder: Path, limit: float
) -> dict[Replayed, float]:
    """Return the simulated seconds of each message on a machine; write files in `folder`.

    Args:
        limit: the maximum seconds of real time that simulating one algorithm may take.

    Raises:
        subprocess.TimeoutExpired: the simulation took longer.
        subprocess.CalledProcessError: SMPI failed.
    """
    platform, hosts, program = folder / "platform.xml", folder / "hosts", folder / "replay"
    per_node = min(machine.ranks_per_node or ranks, ranks)
    platform.write_text(platform_of(machine, ranks))
    hosts.write_text("".join(f"n{r // per_node}-{r % per_node}\n" for r in range(ranks)))
    if not program.exists():
        subprocess.run(["smpicc", "-std=c99", "-O2", PROGRAM, "-o", program], check=True)
    by_algorithm: dict[tuple[str, str], list[Replayed]] = {}
    for message in dict.fromkeys(messages):
        by_algorithm.setdefault((message.primitive, message.algorithm), []).append(message)
    seconds = {}
    for (primitive, algorithm), alike in by_algorithm.items():
        file = folder / "messages.txt"
        file.write_text("".join(message.text() for message in alike))
        options = OPTIONS | collective(primitive, algorithm)
        command = ["smpirun", "-np", str(ranks), "-hostfile", hosts, "-platform", platform]
        command += [f"--cfg={key}:{value}" for key, value in options.items()]
        command += ["--log=root.thresh:error", program, file]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit)
        seconds |= zip(alike, map(float, ended.stdout.split()), strict=True)
    return seconds


def collective(primitive: str, algorithm: str) -> dict[str, str]:
    """Return the SMPI options that choose the algorithm of a primitive.

    A binomial allreduce is a reduction to one rank and a broadcast, each along a tree.
    """
    if (primitive, algorithm) == ("Allreduce", "binomial"):
        tree = {"smpi/reduce": "binomial", "smpi/bcast": "binomial_tree"}
        return {"smpi/allreduce": "redbcast"} | tree
    if primitive == PASSED or not NAMES[primitive][algorithm]:
        return {}
    key = "alltoallv" if primitive == "Alltoall" else primitive.lower()
    return {f"smpi/{key}": NAMES[primitive][algorithm]}


def platform_of(machine: Machine, ranks: int) -> str:
    """Return the network as SimGrid XML; each rank and each node has one link in each direction."""
    per_node = min(machine.ranks_per_node or ranks, ranks)
    inside, between = machine.inside, machine.between or machine.inside
    nodes = range(-(-ranks // per_node))
    lines = [
        '<?xml version="1.0"?>',
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1"><zone id="machine" routing="Full">',
    ]
    for node in nodes:
        lines.append(
            f'<cluster id="n{node}" prefix="n{node}-" suffix="" radical="0-{per_node - 1}" '
            f'speed="1Gf" bw="{inside.bandwidth / SCALE}Bps" lat="{inside.latency / 2}s" '
            f'sharing_policy="SPLITDUPLEX" router_id="r{node}"/>'
        )
    latency = max(0.0, between.latency - inside.latency) / 2
    for node in nodes:
        lines.append(
            f'<link id="l{node}" bandwidth="{between.bandwidth / SCALE}Bps" latency="{latency}s" '
            'sharing_policy="SPLITDUPLEX"/>'
        )
    for a in nodes:
        for b in range(a + 1, len(nodes)):
            lines.append(
                f'<zoneRoute src="n{a}" dst="n{b}" gw_src="r{a}" gw_dst="r{b}">'
                f'<link_ctn id="l{a}" direction="UP"/><link_ctn id="l{b}" direction="DOWN"/>'
                "</zoneRoute>"
            )
    return "\n".join([*lines, "</zone></platform>", ""])


# -- comparison ------------------------------------------------------------------------------------


@cache
def plan_of(name: str, ranks: int, machine: str, model: str = "resnet50") -> Plan:
    """Return the plan that `mpikfac simulate` makes from a strategy for a machine.

    Args:
        name: the name of a strategy, optionally with the suffix " in parts" (without shards) or
            " on nodes" (two levels).
    """
    strategy, network = name.removesuffix(IN_PARTS).removesuffix(ON_NODES), load_machine(machine)
    options = SIMULATE.read(
        [
            *("--machine", machine, "--model", model, "--ranks", str(ranks)),
            *("--strategy", strategy, "--factor_update_steps", "10", "--inv_update_steps", "100"),
            *(["--transport.balanced_shards", "false"] if name.endswith(IN_PARTS) else []),
            *(
                ["--transport.ranks_per_node", str(network.ranks_per_node)]
                * name.endswith(ON_NODES)
            ),
        ]
    )
    of_model = predictions.network_of(options)
    return predictions.foreseen_of(options, of_model, strategy, ranks, network).plan


def predicted(plan: Plan, machine: Machine, statistics: bool, refresh: bool) -> dict[str, float]:
    """Return the predicted seconds of a step's messages by stage, for the slowest rank."""
    return max(
        (
            by_stage(
                (message.stage, seconds_of(message, plan, rank, machine))
                for message in plan.messages(rank, statistics, refresh)
            )
            for rank in simulator.representatives(plan)
        ),
        key=lambda stages: sum(stages.values()),
    )


def seconds_of(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Return the predicted seconds of a message."""
    if overlapped(message, plan):
        return costs.overlapped_seconds(message, plan, rank, machine)
    return costs.message_seconds(message, plan, rank, machine)


def by_stage(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the seconds of each stage."""
    stages: dict[str, float] = {}
    for stage, of_message in seconds:
        stages[stage] = stages.get(stage, 0.0) + of_message
    return stages
