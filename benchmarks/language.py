"""Compare bits per byte of K-FAC, AdamW, Muon and SOAP on the sources of Python's library.

    OMP_NUM_THREADS=1 python benchmarks/language.py

`gpt_small` passes once over 3,840 windows of 64 bytes, 16 windows per step, as in
`jobs/configs/text_kfac.yaml`. Three learning rates are tried for every optimizer. With seed 0, the
rate is chosen by the bits of the last 60 training steps, on text that the network sees for the
first time. Seeds 1, 2 and 3 then give the bits of the test text, the last tenth of the library.

Runs are kept in `results/language.json` and are not repeated. CPU seconds of a step are measured
with all optimizers alternating, and are kept as well. `--known` prints the table of the known runs
and draws `docs/pictures/language.svg`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import mpikfac
from mpikfac_apps.lab.study.report.style import (
    WIDTH,
    bars_between,
    figure_file,
    legend,
    styled,
    variant_style,
)
from mpikfac_apps.options.parse import parse
from mpikfac_apps.options.strategy import kfac_settings, make_strategy
from mpikfac_apps.text import number
from mpikfac_apps.training import train
from mpikfac_apps.training.parts.problem import build

RESULTS = Path(__file__).parent / "results" / "language.json"
ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "language.svg"
CONFIG = ROOT / "jobs" / "configs" / "text_kfac.yaml"
COMMON = "--warmup_epochs=0.1", "--weight_decay=0"
KFAC = (  # of the kept runs; today's defaults are different
    *("--optimizer=kfac", "--kfac.relative_damping=0.1", "--kfac.fisher_type=mc"),
    *("--kfac.factor_update_steps=10", "--kfac.inv_update_steps=20"),
    "--kfac.grafting.max_trust_ratio=1e9",
)
DIRECTIONS = "--kfac.momentum_of=directions"
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # options, rates
    "K-FAC": (KFAC, ("0.00125", "0.0025", "0.005")),
    "K-FAC, momentum of directions": ((*KFAC, DIRECTIONS), ("0.0003", "0.001", "0.003")),
    "AdamW": (("--optimizer=adamw",), ("0.0003", "0.001", "0.003")),
    "Muon": (("--optimizer=muon",), ("0.003", "0.01", "0.03")),
    "SOAP": (("--optimizer=soap",), ("0.003", "0.01", "0.03")),
}
SEARCH, SEEDS = 0, (1, 2, 3)
COST = "CPU seconds of a step"
LAST = 3  # lines of metrics, of 20 steps each
ROUNDS, STEPS = 5, 20  # of the measurement of CPU seconds: whole periods of K-FAC
Run = dict[str, Any]


def main() -> int:
    """Run all missing runs, measure steps, then print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language"))
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    if not options.known:
        everything(options.out)
    report()
    return 0


def everything(out: Path) -> None:
    """Run all missing runs: searches, then seed by seed; measure steps at the end."""
    for way, (_, rates) in WAYS.items():
        for rate in rates:
            run(out, way, rate, SEARCH)
    for seed in SEEDS:
        for way in WAYS:
            run(out, way, best(way), seed)
    if COST not in read():
        keep(COST, cpu_seconds())


def read() -> dict[str, Any]:
    """Return all known results."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, value: Any) -> None:
    """Add a result to the file."""
    known = read() | {name: value}
    texts = (f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
    RESULTS.write_text("{" + ",\n".join(texts) + "}\n")


def name_of(way: str, rate: str, seed: int) -> str:
    """Return the name of a run."""
    return f"{way}, lr {rate}, seed {seed}"


def run(out: Path, way: str, rate: str, seed: int) -> None:
    """Train and keep the bits of training windows by step, and of the test; skip a known run."""
    name = name_of(way, rate, seed)
    if name in read():
        return
    shutil.rmtree(out / name, ignore_errors=True)
    chosen = (*COMMON, *WAYS[way][0], f"--lr={rate}", f"--seed={seed}", "--threads=1")
    train.main(["--config", str(CONFIG), *chosen, f"--run_dir={out / name}"])
    lines = list(map(json.loads, (out / name / "metrics.jsonl").read_text().splitlines()))
    curve = [line for line in lines if "loss" in line]
    bits = [round(line["loss"] / math.log(2), 4) for line in curve]
    test = round(lines[-1]["test_bits_per_byte"], 4)
    keep(name, {"step": [line["step"] for line in curve], "bits": bits, "test": test})
    print(f"{name}: {test:.3f}", flush=True)


def final(run: Run) -> float:
    """Return the bits of a run's last training windows."""
    return statistics.mean(run["bits"][-LAST:])


def best(way: str) -> str:
    """Return the learning rate with the fewest bits of the last training windows of seed 0."""
    known = read()
    rates = [rate for rate in WAYS[way][1] if name_of(way, rate, SEARCH) in known]
    return min(rates, key=lambda rate: final(known[name_of(way, rate, SEARCH)]), default="")


# -- CPU seconds of a step -----------------------------------------------------------------------


def cpu_seconds() -> dict[str, float]:
    """Return the median CPU seconds of a step, of rounds in which all optimizers take turns."""
    trainers = {way: trainer(way) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in trainers}
    for turn in range(ROUNDS + 1):
        for way, made in trainers.items():
            start = time.process_time()
            for _ in range(STEPS):
                step(made)
            if turn:  # the first turn makes states and bases
                found[way].append((time.process_time() - start) / STEPS)
    return {way: round(statistics.median(times), 4) for way, times in found.items()}


def trainer(way: str) -> mpikfac.KFAC | mpikfac.FirstOrderTrainer:
    """Return the trainer of a run on one rank."""
    arguments = ["--config", str(CONFIG), *WAYS[way][0]]
    options, comm = parse(arguments, 1), mpikfac.world()
    model, optimizer = build(options, 256, 64, torch.device("cpu"))
    strategy, chosen = make_strategy(options.distribution, options.kfac, 1)
    if options.optimizer != "kfac":
        return mpikfac.FirstOrderTrainer(model, optimizer, comm, strategy)
    settings = kfac_settings(options.kfac, chosen, float)
    return mpikfac.KFAC(model, optimizer, comm, strategy, **settings)


def step(trainer: mpikfac.KFAC | mpikfac.FirstOrderTrainer) -> None:
    """Take a step on random bytes."""
    windows = torch.randint(256, (16, 65))
    trainer.optimizer.zero_grad()
    outputs = trainer.model(windows[:, :-1])
    loss = F.cross_entropy(outputs, windows[:, 1:])
    if isinstance(trainer, mpikfac.KFAC):
        trainer.record(outputs)
    loss.backward()
    trainer.step()


# -- table and picture ---------------------------------------------------------------------------


def report() -> None:
    """Print searches and results, and draw the curves."""
    known = read()
    print("way, lr: bits of the last training windows of seed 0")
    for way in WAYS:
        names = {rate: name_of(way, rate, SEARCH) for rate in WAYS[way][1]}
        tried = [
            f"{rate}: {final(known[name]):.3f}" for rate, name in names.items() if name in known
        ]
        print(f"| {way} | {' | '.join(tried)} |")
    complete = {way: repeated(way) for way in WAYS if best(way)}
    if "AdamW" not in complete:
        return
    cost = known.get(COST, {})
    level = statistics.mean(map(final, complete["AdamW"]))
    print(f"steps until AdamW's last training bits, {level:.3f}")
    for way, found in complete.items():
        tests = [one["test"] for one in found]
        cells = [
            way,
            best(way),
            number(len(found), "seed"),
            ", ".join(f"{test:.3f}" for test in tests),
        ]
        cells.append(f"{statistics.mean(tests):.3f}")
        steps = reached(found, level)
        cells.append("never" if steps is None else f"{steps} steps")
        if way in cost:
            cells += [f"{1e3 * cost[way]:.0f} ms", f"{found[0]['step'][-1] * cost[way]:.0f} s"]
        print(f"| {' | '.join(cells)} |")
    draw(complete, cost)


def repeated(way: str) -> list[Run]:
    """Return known runs with the best rate; before a repetition, the run of the search."""
    known, rate = read(), best(way)
    found = [known.get(name_of(way, rate, seed)) for seed in SEEDS]
    return [run for run in found if run] or [known[name_of(way, rate, SEARCH)]]


def mean_curve(runs: list[Run]) -> tuple[list[int], list[float]]:
    """Return steps, and mean bits over seeds."""
    return runs[0]["step"], [statistics.mean(bits) for bits in zip(*(run["bits"] for run in runs))]


def reached(runs: list[Run], level: float) -> int | None:
    """Return the steps until the mean over seeds of training bits, over 20 steps, is at a level."""
    return next((step for step, bits in zip(*mean_curve(runs)) if bits <= level), None)


def draw(complete: dict[str, list[Run]], cost: dict[str, float]) -> None:
    """Draw mean training bits by step, and by CPU seconds where these were measured.

    Bars beside the last points extend from the lowest to the highest seed.
    """
    styles = {way: variant_style(place) | {"markersize": 5} for place, way in enumerate(WAYS)}
    with styled():
        figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, (way, runs) in enumerate(complete.items()):
            steps, bits = mean_curve(runs)
            ends = [run["bits"][-1] for run in runs]
            left.plot(steps, bits, **styles[way])
            beside = steps[-1] * (1.03 + 0.02 * place)
            bars_between(left, [beside], [(min(ends), bits[-1], max(ends))], styles[way])
            left.plot(beside, bits[-1], **styles[way])
            if way in cost:
                right.plot([step * cost[way] for step in steps], bits, **styles[way])
        left.set_xticks(range(0, steps[-1] + 1, 60))
        left.set(title="by steps, with the range of seeds", xlabel="steps", ylim=(2, 5))
        left.set(ylabel="training bits per byte, mean over seeds 1 to 3")
        right.set(title="by time, where it was measured")
        right.set(xlabel="steps times CPU seconds of a step")
        for panel in (left, right):
            panel.set_xlim(left=0)
        figure.suptitle(
            "Small GPT, one pass over 3,840 windows of 64 bytes, best learning rates",
            fontsize="medium",
        )
        legend(figure, {way: styles[way] for way in complete}, columns=5)
    PICTURE.write_bytes(figure_file(figure, "svg"))


if __name__ == "__main__":
    sys.exit(main())
