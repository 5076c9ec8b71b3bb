"""Write the page that compares predictions with measurements. No MPI.

    python benchmarks/scoreboard.py > docs/extensions/scoreboard.md

Predictions are computed again, except for those of measured steps, which were made with the steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpikfac_apps.lab.reproduce import appendix
from mpikfac_apps.lab.reproduce.records import RESULTS
from mpikfac_apps.lab.reproduce.registry import ENTRIES


def main() -> None:
    """Print the page."""
    print("\n".join(page()))


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        *("# How accurate are the predictions?", ""),
        "This page compares [predictions](prediction.md) with measurements. The error is",
        "predicted / measured - 1. `python benchmarks/scoreboard.py` writes the page;",
        "[`mpikfac reproduce`](reproduce.md) prints the sources of published values.",
        *("", "## Published numbers", ""),
        "These values are for ResNet-50. The bytes, and two quantities derived from them, are",
        "compared with SC20's formulas:",
        "",
        *numbers("sc20-bytes"),
        "",
        "The following times were published. Only the bandwidth of `rtx2080ti-ib100` was fitted,",
        "to the time for all factors:",
        "",
        *numbers("spd-kfac-profile"),
        "",
        "SC20 reports that 55 epochs of K-FAC took 18 to 25 % less time than 90 epochs of SGD on",
        "16 to 256 GPUs; the ratios in the column *derived* below follow from this. `(10, 100)`",
        "are the update intervals of factors and bases in the authors' job script for 55 epochs on",
        "64 GPUs; it is unclear whether the published times used them. The predictions assume Open",
        "MPI's collectives and estimated times for computing the eigenbases, and do not reproduce",
        "these ratios:",
        "",
        *numbers("sc20-ratios"),
        "",
        "The authors also list epoch times of two runs of K-FAC for each number of GPUs, with",
        "new bases every ten steps. The list does not state the other settings; we assumed",
        "K-FAC-lw, V100, 32 images per GPU and new factors in every step. With these",
        "assumptions, five of the six runs of K-FAC are predicted within 20 %. The sixth, on 64",
        "GPUs, took 1.5 times as long as the other run on 64 GPUs. SGD's predicted steps are",
        "much shorter than the published ones. A published epoch includes reading the images, with",
        "torch and Horovod of 2020; how much this contributes was not measured. For 64 GPUs, the",
        "list gives 4:08 for an epoch of SGD, but in the run of 90 epochs, an epoch took 5:32 on",
        "average. The time that K-FAC adds to a step of SGD is not reproduced, except for the run",
        "of K-FAC that took 1.5 times as long:",
        "",
        *numbers("sc20-steps"),
        *("", "## Steps on emulated hosts", ""),
        "Steps were measured on four emulated hosts ([all",
        "strategies](../../benchmarks/results/emulated.json)). The predictions were made at the",
        "time of the measurement:",
        "",
        *table(["", "strategies", "mean error", "largest error"], emulated()),
        *("", "## Collectives on 64 simulated hosts", ""),
        "The collectives were simulated with",
        "[SMPI](../../benchmarks/results/collectives.json) for 98 MiB, one rank per host, 12.5",
        "GB/s and 19 us per hop. The unequal parts are ResNet-50's layers on their owners. In the",
        "simulation, the acknowledgments of a flow take bandwidth from flows in the opposite",
        "direction:",
        "",
        *numbers("smpi-collectives"),
        "",
        *steps(),
        *("## Not measured", ""),
        "- [K-FAC and preconditioners on GPUs](../../benchmarks/results/predictions.md)",
        "- clients and servers",
        "- steps of more than 16 real ranks",
    )


def numbers(*names: str) -> Iterator[str]:
    """Yield the lines of a table of entries of `mpikfac reproduce`, which have equal titles."""
    yield from table(
        ["", "where", ENTRIES[names[0]].expected, "predicted", "error"],
        (appendix.cells(ENTRIES[name], row)[:5] for name in names for row in ENTRIES[name].rows()),
    )


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
    yield from (
        "The messages of a step of ResNet-50 were simulated with SMPI",
        "([all strategies](../../benchmarks/results/smpi.json)):",
        "",
    )
    rows = (summary(setting, off) for setting, off in groups.items())
    yield from table(["ranks", "strategies", "mean error", "largest error"], rows)
    yield ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
