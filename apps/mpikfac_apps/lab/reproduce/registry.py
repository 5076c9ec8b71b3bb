"""The published results that `mpikfac reproduce` knows."""

from __future__ import annotations

from mpikfac_apps.lab.reproduce import published, records, training
from mpikfac_apps.lab.reproduce.entry import Entry

SC20_RESULTS = "github.com/gpauloski/kfac-pytorch/blob/04c75f5/docs/results.md"

_ENTRIES = (
    Entry(
        name="sc20-bytes",
        about="messages of K-FAC-opt and K-FAC-lw, ResNet-50",
        paper="method of SC20",
        source="2 (P - 1) / P 4 F of factors, (P - 1) / P 4 F of bases; "
        "the largest factor has 21.6 % of the operations",
        found="predicted",
        tolerance=0.02,
        seconds=5,
        rows=published.sc20_bytes,
        expected="by the formula",
    ),
    Entry(
        name="kaisa-bytes",
        about="messages by the number of gradient workers, ResNet-50",
        paper="method of KAISA",
        source="(w - 1) / P 4 F of bases, (P - w) / P 4 N of directions",
        found="predicted",
        tolerance=0.01,
        seconds=6,
        rows=published.kaisa_bytes,
        expected="by the formula",
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
        about="steps of SGD and K-FAC, ResNet-50",
        paper="SC20",
        source=f"seconds of an epoch in {SC20_RESULTS}, divided by the steps of an epoch. Assumed, "
        "as the file does not say so: K-FAC-lw, V100, 32 images on each GPU, factors in every "
        "step; the file says that bases are computed in every tenth step. SGD's epoch of 4:08 on "
        "64 GPUs contradicts its run, which took 5:32 per epoch",
        found="predicted",
        tolerance=0.2,
        seconds=8,
        rows=published.sc20_steps,
    ),
    Entry(
        name="smpi-collectives",
        about="unequal parts of ResNet-50, collectives on 64 simulated hosts",
        paper="method of Thakur et al. 2005",
        source="SMPI of SimGrid 3.32, benchmarks/results/collectives.json",
        found="predicted",
        tolerance=0.06,
        seconds=3,
        rows=published.smpi_collectives,
        expected="simulated",
    ),
    Entry(
        name="exchange-rules",
        about="steps of exchanges, compared with the rules in their papers",
        paper="methods of Lin et al. 2020, Douillard et al. 2023 and 2025, Parle, LSGD, DASO",
        source="the rules in numpy, mpikfac_apps/lab/reproduce/rules.py",
        found="measured",
        tolerance=1e-9,
        seconds=10,
        rows=training.exchanges,
        expected="by the rule",
    ),
    Entry(
        name="defaults",
        about="K-FAC with its default settings on an autoencoder",
        paper="method of Martens & Grosse 2015",
        source="this project's record, benchmarks/results/defaults.jsonl, seed 0",
        found="measured",
        tolerance=0.02,
        seconds=50,
        rows=training.defaults,
        data="curves, generated",
        expected="recorded",
    ),
    Entry(
        name="time-to-accuracy",
        about="accuracy of K-FAC in half of SGD's epochs, CIFAR-10",
        paper="SC20",
        source=f"ResNet-32 on 4 GPUs, 100 and 200 epochs, 92.52 and 92.74 %, in {SC20_RESULTS}; "
        "here ResNet-20, K-FAC by default and SGD with tuned settings, means of 3 and 2 seeds",
        found="recorded",
        tolerance=0.5,
        seconds=25_000,
        rows=records.time_to_accuracy,
        data="CIFAR-10, as cifar-10-batches-bin",
        again="python benchmarks/time_to_accuracy.py --data DIR --images 50000 --optimizers sgd; "
        "python benchmarks/defaults.py --data DIR --optimizers kfac --networks 'resnet20, all "
        "images'",
        points=True,
    ),
)
ENTRIES = {entry.name: entry for entry in _ENTRIES}
