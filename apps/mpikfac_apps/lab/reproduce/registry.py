"""The published results that `mpikfac reproduce` knows."""

from __future__ import annotations

from mpikfac_apps.lab.reproduce import published, records, training
from mpikfac_apps.lab.reproduce.entry import Entry

SC20_RESULTS = "github.com/gpauloski/kfac-pytorch/blob/04c75f5/docs/results.md"

_ENTRIES = (
    Entry(
        name="sc20-bytes",
        about="messages of K-FAC-opt and K-FAC-lw, ResNet-50",
        paper="SC20",
        source="derived from the method: 2 (P - 1) / P 4 F of factors, (P - 1) / P 4 F of bases; "
        "the largest factor has 21.6 % of the operations",
        found="predicted",
        tolerance=0.02,
        seconds=5,
        rows=published.sc20_bytes,
    ),
    Entry(
        name="kaisa-bytes",
        about="messages by the number of gradient workers, ResNet-50",
        paper="KAISA",
        source="derived from the method: (w - 1) / P 4 F of bases, (P - w) / P 4 N of directions",
        found="predicted",
        tolerance=0.01,
        seconds=6,
        rows=published.kaisa_bytes,
    ),
    Entry(
        name="spd-kfac-profile",
        about="times of D-KFAC's messages, ResNet-50",
        paper="SPD-KFAC",
        source="scripts/time_breakdown.py of github.com/lzhangbv/kfac_pytorch at c45acb8, the "
        "paper's figure; the bandwidth was fitted to the time for all factors",
        found="predicted",
        tolerance=0.05,
        seconds=3,
        rows=published.spd_kfac_profile,
    ),
    Entry(
        name="sc20-ratios",
        about="step of K-FAC-opt over SGD's, ResNet-50",
        paper="SC20",
        source="abstract: 18 to 25 % less time; the middle, for 55 epochs instead of 90",
        found="predicted",
        tolerance=0.05,
        seconds=8,
        rows=published.sc20_ratios,
    ),
    Entry(
        name="sc20-steps",
        about="steps of SGD and K-FAC-lw, ResNet-50",
        paper="SC20",
        source=f"seconds of an epoch in {SC20_RESULTS}, over the steps of an epoch",
        found="predicted",
        tolerance=0.2,
        seconds=8,
        rows=published.sc20_steps,
    ),
    Entry(
        name="smpi-collectives",
        about="unequal parts of ResNet-50, collectives on 64 simulated hosts",
        paper="Thakur et al. 2005",
        source="SMPI of SimGrid 3.32, benchmarks/results/collectives.json",
        found="predicted",
        tolerance=0.06,
        seconds=3,
        rows=published.smpi_collectives,
    ),
    Entry(
        name="exchange-rules",
        about="steps of exchanges beside the rules of their papers",
        paper="Lin et al. 2020, Douillard et al. 2023 and 2025, Parle, LSGD, DASO",
        source="the rules in numpy, mpikfac_apps/lab/reproduce/rules.py",
        found="measured",
        tolerance=1e-9,
        seconds=10,
        rows=training.exchanges,
    ),
    Entry(
        name="defaults",
        about="K-FAC with its default settings on an autoencoder",
        paper="Martens & Grosse 2015",
        source="this project's record, benchmarks/results/defaults.jsonl, seed 0",
        found="measured",
        tolerance=0.02,
        seconds=50,
        rows=training.defaults,
        data="curves, generated",
    ),
    Entry(
        name="time-to-accuracy",
        about="epochs of K-FAC and SGD for the same accuracy, CIFAR-10",
        paper="SC20",
        source=f"ResNet-32 on 4 GPUs, 100 and 200 epochs, 92.52 and 92.74 %, in {SC20_RESULTS}; "
        "here ResNet-20, with tuned settings for 7 and 15 epochs",
        found="recorded",
        tolerance=0.1,
        seconds=25_000,
        rows=records.time_to_accuracy,
        data="CIFAR-10, as cifar-10-batches-bin",
        again="python benchmarks/time_to_accuracy.py --data DIR --images 50000 "
        "--optimizers sgd kfac",
    ),
)
ENTRIES = {entry.name: entry for entry in _ENTRIES}
