"""Write the page that compares predictions with measurements. No MPI.

    python benchmarks/scoreboard.py > docs/extensions/scoreboard.md

Predictions are computed again, except for those of measured steps, which were made with the steps.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import mpikfac
from mpikfac import CommOpt, MemOpt, Strategy, Transport, make_plan
from mpikfac.predict import algorithms, costs
from mpikfac_apps.lab.predict import simulate
from mpikfac_apps.lab.predict.options import SIMULATE
from mpikfac_apps.problems import models

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
SC20 = (1 - 0.215) * 90 / 55  # 18 to 25 % less time, in 55 epochs instead of 90
EPOCHS = {16: (348, 719), 32: (392, 686), 64: (396, 699)}
"""Milliseconds of a step of SGD and of K-FAC-lw by number of V100: the epochs of ImageNet that
SC20's authors list in the results of their repository, divided by the steps."""
Row = tuple[str, str, float, float]
"""A prediction: what, where, measured, predicted."""


def main() -> None:
    """Print the page."""
    print("\n".join(page()))


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    compared = "predicted", "error"
    yield from (
        *("# How accurate are the predictions?", ""),
        "This page compares [predictions](prediction.md) with measurements. The error is",
        "predicted / measured - 1. `python benchmarks/scoreboard.py` writes the page.",
        *("", "## Published numbers", ""),
        "These values are for ResNet-50. Only the bandwidth of `rtx2080ti-ib100` was fitted, to",
        "the time for all factors:",
        "",
        *table(["", "where", "published", *compared], map(cells, published())),
        "",
        "SC20 needed 18 to 25 % less time for 55 epochs of K-FAC than for 90 epochs of SGD on 16",
        "to 256 GPUs; the table uses the midpoint. `(10, 100)` are the intervals of factors and",
        "bases in the authors' job script for 64 GPUs, `(50, 500)` those of",
        "[SC21](../reference/references.md); it is not known here which of them the published",
        "times used. The predictions assume Open MPI's collectives and estimated times",
        "of eigenbases.",
        "",
        "The authors also list the times of epochs, with factors in every step and bases in every",
        "tenth. K-FAC's steps are predicted well; SGD's are predicted to be much faster, as an",
        "epoch includes reading the images, and torch and Horovod were those of 2020. So the",
        "ratios above are too high because of the denominator. Milliseconds per step:",
        "",
        *table(["", "where", "published", *compared], map(cells, epochs())),
        *("", "## Steps on emulated hosts", ""),
        "The steps ran on four hosts ([all strategies](../../benchmarks/results/emulated.json)).",
        "The predictions were made at the time of the measurement:",
        "",
        *table(["", "strategies", "mean error", "largest error"], emulated()),
        *("", "## Collectives on 64 simulated hosts", ""),
        "The table lists milliseconds, simulated with",
        "[SMPI](../../benchmarks/results/collectives.json) for 98 MiB, one rank per host, 12.5",
        "GB/s and 19 us per hop. Unequal parts are ResNet-50's layers on their owners. In the",
        "simulation, the acknowledgments of a flow take bandwidth from flows in the opposite",
        "direction:",
        "",
        *table(["", "algorithm", "simulated", *compared], map(cells, collectives())),
        "",
        *steps(),
        *("## Not measured", ""),
        "- [K-FAC and preconditioners on GPUs](../../benchmarks/results/predictions.md)",
        "- clients and servers",
        "- steps of more than 16 real ranks",
    )


def published() -> Iterator[Row]:
    """Yield published numbers of ResNet-50."""
    with torch.device("meta"):
        layers, others = mpikfac.layers.covered_shapes(models.build("resnet50", classes=1000))

    def sent(strategy: Strategy) -> Counter[str]:
        as_published = replace(strategy, transport=Transport(balanced_shards=False))
        plan = make_plan(layers, 16, as_published, others, "eigen")
        found = Counter[str]()
        for message in plan.messages(0, True, True):
            found[message.stage] += message.wire
        return found

    everyone, owners = (
        sent(Strategy(CommOpt())),
        sent(Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))),
    )
    yield "MiB of gradients", "a rank of 16", 182, everyone["reduce gradients"] / MIB
    yield "MiB of factors as squares", "a rank of 16", 1100, 2 * everyone["reduce statistics"] / MIB
    yield "MiB of bases", "a rank of 16", 551, everyone["publish bases"] / MIB
    yield "MiB of factors to owners", "a rank of 16", 275, owners["reduce statistics"] / MIB
    loads = {
        ranks: max(map(plan.load, range(ranks)))
        for ranks in (1, 16)
        for plan in [make_plan(layers, ranks, Strategy(CommOpt(colocate_factors=False)), others)]
    }
    yield "speedup from distributing decompositions", "16 ranks", 4.6, loads[1] / loads[16]
    directions = sent(Strategy(MemOpt()))["publish gradients"]
    equal = everyone["publish bases"] / directions
    yield "interval of bases at which COMM-OPT and MEM-OPT send equal bytes", "16 ranks", 6, equal
    machine = mpikfac.predict.load_machine("rtx2080ti-ib100")
    for what, primitive, size, seconds in (
        ("s for all factors", "Allreduce", 586.9 * MIB, 0.300),
        ("s for all inverses", "Allgatherv", 586.9 * MIB, 0.146),
        ("s for gradients", "Allreduce", 97.7 * MIB, 0.067),
    ):
        ring = algorithms.rounds(primitive, "ring", [size / 64] * 64, machine.ranks_per_node or 1)
        found = sum(sum(costs.round_seconds(one, machine)) for one in ring)
        yield what, "64 GPUs, rings of NCCL", seconds, found
    for ranks, intervals in ((16, (10, 100)), (64, (10, 100)), (64, (50, 500)), (256, (10, 100))):
        what = f"step of K-FAC-opt over SGD's, {intervals}"
        yield what, f"{ranks} V100", SC20, over_sgd(ranks, *intervals)


def over_sgd(ranks: int, factor_update_steps: int, inv_update_steps: int) -> float:
    """Return the step of K-FAC-opt with eigenbases in units of SGD's step."""
    sgd, kfac = of_steps([ranks], "kfac-opt", factor_update_steps, inv_update_steps)
    return kfac / sgd


def epochs() -> Iterator[Row]:
    """Yield the published steps of SGD and of K-FAC-lw."""
    found = iter(of_steps(EPOCHS, "kfac-lw", 1, 10))
    for ranks, published_ms in EPOCHS.items():
        for what, ms in zip(("SGD", "K-FAC-lw, (1, 10)"), published_ms):
            yield what, f"{ranks} V100", ms, 1e3 * next(found)


def of_steps(
    ranks: Iterable[int], strategy: str, factor_update_steps: int, inv_update_steps: int
) -> list[float]:
    """Return the seconds of a step of SGD, then of a strategy, for each number of ranks."""
    words = f"--machine v100-edr --model resnet50 --ranks {','.join(map(str, ranks))}"
    words += f" --strategy sgd,{strategy} --preconditioner eigen --grafting none"
    words += " --transport.overlap false"
    words += f" --factor_update_steps {factor_update_steps} --inv_update_steps {inv_update_steps}"
    machine = mpikfac.predict.load_machine("v100-edr")
    rows = simulate.predictions(SIMULATE.read(words.split()), machine)
    return [float(row["mean"]["seconds"]) for row in rows]


def emulated() -> Iterator[list[str]]:
    """Yield a line for each setting of emulated hosts."""
    for setting, group in json.loads((RESULTS / "emulated.json").read_text()).items():
        if "off by" in group["columns"]:
            place = group["columns"].index("off by")
            off = {row[0]: int(re.sub(r"[ %]", "", row[place])) / 100 for row in group["rows"]}
            yield summary(setting, off)


def summary(setting: str, off: Mapping[str, float]) -> list[str]:
    """Return the cells of a setting, by the deviation of every strategy."""
    most = max(off, key=lambda name: abs(off[name]))
    mean = sum(map(abs, off.values())) / len(off)
    return [setting, str(len(off)), f"{100 * mean:.0f} %", f"{most}: {100 * off[most]:+.0f} %"]


def collectives() -> Iterator[Row]:
    """Yield collectives on simulated hosts."""
    values = json.loads((RESULTS / "collectives.json").read_text())
    bandwidth = values["bandwidth"] / values["divided_by"]
    parts = [4.0 * count for count in values["elements"]]
    for row in values["rows"]:
        of_all = row["primitive"] == "Allreduce"
        sizes = [sum(parts) / len(parts)] * len(parts) if of_all else parts
        found = algorithms.rounds(row["primitive"], row["algorithm"], sizes)
        seconds = sum(one.times * (values["latency"] + one.size / bandwidth) for one in found)
        yield row["primitive"], row["algorithm"], row["simulated_ms"], seconds * 1e3


def steps() -> Iterator[str]:
    """Yield a section about the messages of steps on simulated hosts, if there are any."""
    file = RESULTS / "smpi.json"
    if not file.exists():
        return
    groups: dict[str, dict[str, float]] = {}
    for row in json.loads(file.read_text()):
        group = groups.setdefault(f"{row['ranks']} of {row['machine']}", {})
        group[row["strategy"]] = row["predicted_ms"] / row["simulated_ms"] - 1
    yield from ("## Messages of a step on simulated hosts", "")
    yield from ("SMPI, ResNet-50 ([all strategies](../../benchmarks/results/smpi.json)):", "")
    rows = (summary(setting, off) for setting, off in groups.items())
    yield from table(["ranks", "strategies", "mean error", "largest error"], rows)
    yield ""


def cells(row: Row) -> list[str]:
    """Return the cells of a prediction, with the deviation."""
    what, where, measured, predicted = row
    return [
        what,
        where,
        show(measured),
        show(predicted),
        f"{round(100 * (predicted / measured - 1)):+d} %",
    ]


def show(number: float) -> str:
    """Return a number with three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
