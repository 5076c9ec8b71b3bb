"""Compare test accuracies of optimizers within budgets of epochs on CIFAR-10.

    OMP_NUM_THREADS=1 python benchmarks/time_to_accuracy.py --data DIR --out runs/time_to_accuracy

On 10,000 images, every optimizer has 5 settings and 5 epochs, and K-FAC one more setting with
momentum before preconditioning; the best setting then also has 15 epochs. On all 50,000 images,
first-order optimizers have 15 epochs and K-FAC has 7, and 12 with the best setting. Each learning
rate decays linearly to 0 within the run's own budget. All settings of an optimizer run with seed 0,
then the best setting with more seeds. Test accuracies by epoch are kept in
`results/time_to_accuracy.json`. Runs in the file are not repeated, so several sessions or machines
can share the work. `--known` prints the table of the known runs, and `--picture FILE` draws them.

Seconds follow from the epochs and from `--seconds ROUNDS`, which alternately times short runs of
the best known setting of each of `--optimizers`: run this mode on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from training import CIFAR10, SEEDS, by_epoch, by_turns, launch, step_seconds

from mpikfac_apps.lab.study.report.style import (
    bars_between,
    figure_file,
    hollow,
    styled,
    variant_style,
)
from mpikfac_apps.text import number

RESULTS = Path(__file__).parent / "results" / "time_to_accuracy.json"
FEW, ALL = "10000", "50000"


def setting(epochs: str, batch: str, lr: str, decay: str = "0.02", **kfac: str) -> dict[str, str]:
    """Return options of the training program."""
    more = {f"kfac.{key}": value for key, value in kfac.items()}
    return {"epochs": epochs, "batch": batch, "lr": lr, "weight_decay": decay, **more}


def around(epochs: str, lower: str, lr: str, higher: str) -> list[dict[str, str]]:
    """Return 5 settings: three rates with batches of 128, `lr` with 64 and 256."""
    tried = (("128", lower), ("128", lr), ("128", higher), ("64", lr), ("256", lr))
    return [setting(epochs, batch, rate) for batch, rate in tried]


def before(epochs: str, lr: str, decay: str, **kfac: str) -> dict[str, str]:
    """Return a setting of K-FAC with momentum before preconditioning, and a batch of 128."""
    return setting(epochs, "128", lr, decay, **kfac, momentum_of="gradients")


def recipe(every: int, batch: str, lr: str, decay: str, **more: str) -> dict[str, str]:
    """Return a setting of 7 epochs of K-FAC."""
    intervals = {"factor_update_steps": f"{every}", "inv_update_steps": f"{5 * every}"}
    return setting("7", batch, lr, decay, **intervals, **more)


SHORT = {"sgd": setting("8", "256", "0.1", "0.0005"), "muon": setting("7", "256", "0.01")}
GRIDS: dict[str, dict[str, list[dict[str, str]]]] = {
    FEW: {
        "sgd": [
            setting("5", "256", "0.1", "0.0005"),
            setting("5", "256", "0.2", "0.0005"),
            setting("5", "128", "0.1", "0.0005"),
            setting("5", "64", "0.05", "0.0005"),
            setting("5", "64", "0.1", "0.0005"),
        ],
        "kfac": [
            setting("5", "128", "0.0015", factor_update_steps="10", inv_update_steps="20"),
            setting("5", "128", "0.003", factor_update_steps="10", inv_update_steps="20"),
            setting("5", "128", "0.006", factor_update_steps="10", inv_update_steps="20"),
            setting("5", "64", "0.003", factor_update_steps="20", inv_update_steps="40"),
            setting("5", "256", "0.003", factor_update_steps="5", inv_update_steps="10"),
            before("5", "0.0075", "0.08", factor_update_steps="10", inv_update_steps="20"),
        ],
        "adamw": around("5", "0.001", "0.003", "0.01"),
        "muon": around("5", "0.005", "0.01", "0.02"),
        "soap": around("5", "0.001", "0.003", "0.01"),
    },
    ALL: {
        "sgd": [
            setting("15", "256", "0.05", "0.0005"),
            setting("15", "256", "0.1", "0.0005"),
            setting("15", "256", "0.2", "0.0005"),
            setting("15", "128", "0.1", "0.0005"),
            setting("15", "64", "0.05", "0.0005"),
            SHORT["sgd"],
        ],
        "kfac": [
            recipe(5, "256", "0.003", "0.02"),
            recipe(5, "256", "0.0015", "0.02"),
            recipe(5, "256", "0.006", "0.02"),
            recipe(5, "256", "0.003", "0.06"),
            recipe(5, "256", "0.0015", "0.12"),
            recipe(10, "128", "0.0015", "0.06"),
            recipe(20, "64", "0.0015", "0.06"),
            before("7", "0.0075", "0.12", factor_update_steps="10", inv_update_steps="50"),
            recipe(5, "256", "0.003", "0.02", length="adam"),
            recipe(10, "256", "0.003", "0.02", length="adam", subsample="1"),
            recipe(20, "128", "0.003", "0.02", length="adam", subsample="1"),
        ],
        "adamw": around("15", "0.001", "0.003", "0.01"),
        "muon": [*around("15", "0.005", "0.01", "0.02"), SHORT["muon"]],
        "soap": around("15", "0.001", "0.003", "0.01"),
    },
}
LABELS = {"sgd": "SGD", "kfac": "K-FAC", "adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
LONGER = {FEW: dict.fromkeys(LABELS, "15"), ALL: {"kfac": "12"}}  # epochs, with the best setting


def main() -> int:
    """Run all missing runs, then print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_accuracy"))
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--images", nargs="+", default=[FEW, ALL], choices=[FEW, ALL])
    parser.add_argument("--optimizers", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--picture", type=Path, help="draw what is known, run nothing")
    parser.add_argument("--seconds", type=int, metavar="ROUNDS", help="time steps, train nothing")
    options = parser.parse_args()
    if options.data is None and not (options.known or options.picture):
        parser.error("--data: the folder of the images is missing")
    if options.picture:
        draw(options.picture)
        return 0
    for images in options.images:
        if options.seconds:
            compare_seconds(options, images)
        else:
            for optimizer in options.optimizers:
                search(options, images, optimizer)
    return 0


def search(options: argparse.Namespace, images: str, optimizer: str) -> None:
    """Run what is missing of an optimizer's settings, and print the test accuracies."""
    if not options.known:
        for choice in GRIDS[images][optimizer]:
            train(options, images, optimizer, choice, 0)
        for choice in best_budgets(images, optimizer):
            for seed in SEEDS:
                train(options, images, optimizer, choice, seed)
    tried = GRIDS[images][optimizer]
    for choice in (one for own in tried for one in with_longer(images, optimizer, own)):
        if runs := list(runs_of(images, optimizer, choice)):
            settings = ", ".join(f"{key} {value}" for key, value in choice.items())
            ends = ", ".join(f"{run[-1]:.2%}" for run in runs)
            mean = statistics.mean(run[-1] for run in runs)
            print(f"{images} images, {LABELS[optimizer]}, {settings}: {ends}; mean {mean:.2%}")


def train(
    options: argparse.Namespace, images: str, optimizer: str, choice: dict[str, str], seed: int
) -> None:
    """Keep the test accuracy after each epoch of a run; train only if the run is unknown."""
    name = run_name(images, optimizer, choice, seed)
    if name in known():
        return
    settings = {**CIFAR10, "data.train_images": images, **choice}
    metrics = launch(options, name, optimizer, settings, seed)
    found = [line["test_accuracy"] for line in by_epoch(metrics)]
    results = known() | {name: found}  # read anew: another program may have added a run
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def run_name(images: str, optimizer: str, choice: dict[str, str], seed: int) -> str:
    """Return a run's name in the file of results."""
    return "-".join([images, optimizer, *choice.values(), str(seed)])


def known() -> dict[str, list[float]]:
    """Return the test accuracies by epoch of all finished runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def runs_of(images: str, optimizer: str, choice: dict[str, str]) -> Iterator[list[float]]:
    """Yield the known runs of a setting, by seed."""
    for seed in SEEDS:
        if run := known().get(run_name(images, optimizer, choice, seed)):
            yield run


def best_budgets(images: str, optimizer: str) -> list[dict[str, str]]:
    """Return the setting with the best end of seed 0, also in a longer budget; empty if unknown."""
    ends = {
        run[-1]: choice
        for choice in GRIDS[images][optimizer]
        if (run := known().get(run_name(images, optimizer, choice, 0)))
    }
    return with_longer(images, optimizer, ends[max(ends)]) if ends else []


def with_longer(images: str, optimizer: str, best: dict[str, str]) -> list[dict[str, str]]:
    """Return the setting, and the setting in the longer budget if there is one."""
    longer = LONGER[images].get(optimizer)
    return [best, best | {"epochs": longer}] if longer else [best]


def compare_seconds(options: argparse.Namespace, images: str) -> None:
    """Print median seconds of an epoch of each optimizer, and the ratios to the first optimizer."""

    def epoch_seconds(optimizer: str) -> float:
        settings = {**CIFAR10, "data.train_images": images, **best_budgets(images, optimizer)[0]}
        steps = int(images) / int(settings["batch"])
        return steps * step_seconds(options, optimizer, settings)

    found = by_turns(epoch_seconds, options.optimizers, options.seconds)
    base = found[options.optimizers[0]]
    for optimizer, values in found.items():
        ratios = [one / other for one, other in zip(values, base)]
        texts = [
            f"{statistics.median(some):.2f} ({min(some):.2f} to {max(some):.2f})"
            for some in (values, ratios)
        ]
        print(f"{LABELS[optimizer]}: {texts[0]} s an epoch, ratio {texts[1]}")


def by_default() -> list[float]:
    """Return the test accuracies of K-FAC by default, by seed, after 7 epochs of all images."""
    rows = map(json.loads, RESULTS.with_name("defaults.jsonl").read_text().splitlines())
    return [
        row["result"]["test_accuracy"]
        for row in rows
        if row["job"][:3] == ["resnet20, all images", "kfac", ""]
    ]


def draw(path: Path) -> None:
    """Draw mean and range by epoch of each optimizer's best setting, and ends of other runs.

    The others are K-FAC by default, and short runs of optimizers whose best setting has a long
    schedule.
    """
    styles = {one: variant_style(place) | {"markersize": 5} for place, one in enumerate(LABELS)}
    with styled():
        figure = Figure(figsize=(8, 5.4), layout="constrained")
        axis = figure.subplots()
        for optimizer, label in LABELS.items():
            for choice, line in zip(best_budgets(ALL, optimizer), ("-", "--")):
                columns = [
                    [100 * value for value in column]
                    for column in zip(*runs_of(ALL, optimizer, choice))
                ]
                style = styles[optimizer] | {"linestyle": line}
                tuned = ", tuned" if optimizer == "kfac" else ""
                name = f"{label}{tuned}, {len(columns)} epochs, {number(len(columns[0]), 'seed')}"
                x, means = range(1, len(columns) + 1), [*map(statistics.mean, columns)]
                axis.plot(x, means, **style, label=name)
                ends = [*map(min, columns)], [*map(max, columns)]
                axis.fill_between(x, *ends, color=style["color"], alpha=0.2, linewidth=0)
        draw_end(axis, 7, by_default(), styles["kfac"], "K-FAC by default, 7 epochs")
        for optimizer, choice in SHORT.items():
            epochs, name = int(choice["epochs"]), f"{LABELS[optimizer]}, {choice['epochs']} epochs"
            ends = [run[-1] for run in runs_of(ALL, optimizer, choice)]
            draw_end(axis, epochs, ends, styles[optimizer], f"{name}, batch {choice['batch']}")
        axis.set_title("ResNet-20 on CIFAR-10; bands, bar: range of seeds; hollow: other runs")
        axis.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(60, 88))
        axis.set_yticks(range(60, 89, 4))
        axis.legend(fontsize="small", loc="lower right")
    path.write_bytes(figure_file(figure, "svg"))


def draw_end(
    axis: Axes, epochs: int, ends: Sequence[float], style: dict[str, Any], name: str
) -> None:
    """Draw a hollow mark at the mean end of runs, and their range, beside the last epoch."""
    percent = [100 * end for end in ends]
    mean, beside = statistics.mean(percent), epochs + 0.2
    mark = hollow(style) | {"linestyle": "", "markersize": 7}
    axis.plot(beside, mean, **mark, label=f"{name}, {number(len(ends), 'seed')}")
    if len(ends) > 1:
        bars_between(axis, [beside], [(min(percent), mean, max(percent))], style)


if __name__ == "__main__":
    sys.exit(main())
