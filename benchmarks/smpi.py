"""Compare predicted seconds of messages with a simulation in SimGrid's SMPI, up to 1,024 ranks.

    PYTHONPATH=tests python benchmarks/smpi.py
    PYTHONPATH=tests python benchmarks/smpi.py --predict

ResNet-50, factors every 10 steps, bases every 100: milliseconds of the messages of a mean step.
Computation is not simulated, so overlapped messages count as if nothing hid them, in pieces as they
are sent; agreements of ranks are concurrent with messages, and do not count. "In parts" is without
shards, "on nodes" in two levels. Rows are kept in `results/smpi.json`; a row in the file is not
simulated again, unless --again is given. `--predict` only predicts the rows of the file again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from mpikfac.predict import load_machine
from support import smpi

RESULTS = Path(__file__).parent / "results" / "smpi.json"
MACHINES = ("a100-hdr", "v100-edr")
RANKS = (16, 64, 256, 1024)
STRATEGIES = (
    *("sgd", "comm-opt", "comm-opt in parts", "mem-opt", "mem-opt in parts", "hybrid"),
    *(
        "deferred-sharded",
        "deferred-sharded in parts",
        "deferred-sharded on nodes",
        "sharded-optimizer",
    ),
    *("balanced-shards", "spd-kfac"),
)
SHARES = {(False, False): 0.9, (True, False): 0.09, (True, True): 0.01}
"""The fraction of steps by kind: with or without new factors, and new bases."""
LIMIT = 900  # real seconds of the simulation of an algorithm


def main() -> None:
    """Simulate the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="simulate all rows again")
    parser.add_argument("--predict", action="store_true", help="only predict rows again")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    rows = {} if options.again else stored()
    for ranks in options.ranks:
        for machine in MACHINES:
            known: dict[smpi.Replayed, float] = {}
            for strategy in STRATEGIES:
                key = machine, ranks, strategy
                if options.predict and key in rows:
                    rows[key] |= prediction(*key)
                elif key not in rows and not options.predict:
                    rows[key] = simulation(*key, known) | prediction(*key)
                write(rows)
    print("\n".join(table(rows)))


def stored() -> dict[tuple[str, int, str], dict[str, Any]]:
    """Return the rows of the file by machine, ranks and strategy."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {(row["machine"], row["ranks"], row["strategy"]): row for row in rows}


def write(rows: dict[tuple[str, int, str], dict[str, Any]]) -> None:
    """Keep the rows in the file, in the order of the table."""
    order = sorted(rows, key=lambda key: (key[0], key[1], STRATEGIES.index(key[2])))
    lines = ",\n".join(json.dumps(rows[key]) for key in order)
    RESULTS.write_text(f"[\n{lines}\n]\n")


def simulation(
    machine: str, ranks: int, strategy: str, known: dict[smpi.Replayed, float]
) -> dict[str, Any]:
    """Return a row with the simulated milliseconds of a mean step, or the reason if there are none.

    Args:
        known: the seconds of messages of earlier strategies; the new messages are added.
    """
    row = {"machine": machine, "ranks": ranks, "strategy": strategy}
    plan, network, start = (
        smpi.plan_of(strategy, ranks, machine),
        load_machine(machine),
        time.time(),
    )
    kinds = {kind: smpi.replayed(plan, *kind) for kind in SHARES}
    new = {message for messages in kinds.values() for _, message in messages} - known.keys()
    try:
        with tempfile.TemporaryDirectory() as folder:
            known |= smpi.simulated(new, network, ranks, Path(folder), LIMIT)
    except subprocess.TimeoutExpired:
        return row | {"left_out": f"a simulation took longer than {LIMIT} s"}
    means: dict[str, float] = {}
    for kind, messages in kinds.items():
        stages = smpi.by_stage((stage, known[message]) for stage, message in messages)
        add(means, stages, SHARES[kind])
    algorithms = {stage: message.algorithm for stage, message in kinds[True, True]}
    took = round(time.time() - start, 1)
    return row | columns("simulated", means) | {"algorithms": algorithms, "seconds": took}


def prediction(machine: str, ranks: int, strategy: str) -> dict[str, Any]:
    """Return the columns with the predicted milliseconds of a mean step."""
    plan = smpi.plan_of(strategy, ranks, machine)
    network = load_machine(machine)
    means: dict[str, float] = {}
    for kind, share in SHARES.items():
        add(means, smpi.predicted(plan, network, *kind), share)
    return columns("predicted", means)


def add(means: dict[str, float], stages: dict[str, float], share: float) -> None:
    """Add a fraction of seconds by stage to means."""
    for stage, seconds in stages.items():
        means[stage] = means.get(stage, 0.0) + share * seconds


def columns(name: str, means: dict[str, float]) -> dict[str, Any]:
    """Return milliseconds of all stages together, and of each stage."""
    stages = {stage: round(1e3 * seconds, 3) for stage, seconds in means.items()}
    return {f"{name}_ms": round(1e3 * sum(means.values()), 3), f"{name}_stages_ms": stages}


def table(rows: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    """Return the lines of a table: predicted and simulated milliseconds by ranks."""
    lines = []
    for machine in MACHINES:
        ranks = sorted({key[1] for key in rows if key[0] == machine})
        heads = " | ".join(f"{count:,} ranks" for count in ranks)
        lines += [
            "",
            f"| {machine}: predicted, simulated ms | {heads} |",
            "|---" * (len(ranks) + 1) + "|",
        ]
        for strategy in STRATEGIES:
            cells = [cell(rows.get((machine, count, strategy), {})) for count in ranks]
            lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return lines


def cell(row: dict[str, Any]) -> str:
    """Return predicted and simulated milliseconds of a row."""
    if "simulated_ms" not in row:
        return "-"
    return f"{row['predicted_ms']:.1f}, {row['simulated_ms']:.1f}"


if __name__ == "__main__":
    main()
