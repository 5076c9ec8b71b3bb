"""Predict what preconditioners send, keep and cost, each under its best strategy. No MPI, no GPU.

    PYTHONPATH=tests python benchmarks/prices.py         # ResNet-50, ViT-B/16, GPT-2 small
    PYTHONPATH=tests python benchmarks/prices.py --json prices.json
    PYTHONPATH=tests python benchmarks/prices.py --picture docs/pictures/prices.svg

With `--picture`, nothing is predicted: the rows of `results/prices.json` for the first machine and
the middle number of ranks are drawn. Otherwise, timm and transformers must be installed; networks
have no weights. A published machine has times of
ResNet-50. The seconds of other networks are scaled from ResNet-50's: passes by operations of
products and convolutions, statistics by the operations of sums of outer products, gradients and
optimizer by the number of parameters. AdamW passes over seven vectors, SGD with momentum over five.
A method's strategy is the one with the shortest mean step among those that `strategy=auto` tries.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mpikfac
from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY, NAMED
from mpikfac.preconditioners import PRECONDITIONERS
from mpikfac.predict import Job, Machine
from mpikfac.settings import MOMENTUM
from mpikfac_apps.lab.study.report.style import (
    QUIET,
    WIDTH,
    figure_file,
    hollow,
    legend,
    styled,
    variant_style,
)
from mpikfac_apps.problems import models
from support.torchvision import stand_in

RESULTS = Path(__file__).parent / "results" / "prices.json"
FLOAT32 = 4  # bytes
KNOWN = "resnet50"  # the network of the published machines


class Method(NamedTuple):
    """A method by name.

    Attributes:
        preconditioner: of the layers; None for a first-order method.
        vectors: as long as the weights, that the optimizer keeps.
    """

    name: str
    preconditioner: str | None = None
    vectors: int = 0

    def job(self, model: str, batch: int) -> Job:
        """Return the training, with the interval and the grafting that the preconditioner takes."""
        defaults = PRECONDITIONERS[self.preconditioner or "inverse"].defaults
        every = defaults.factor_update_steps or FACTOR_EVERY, BASIS_EVERY
        return Job(model, batch, *every, grafting=defaults.grafting.with_momentum(MOMENTUM))


METHODS = (
    Method("SGD", vectors=1),
    Method("AdamW", vectors=2),
    Method("K-FAC", "inverse"),
    Method("Newton-Muon", "newton-muon"),
    Method("Shampoo", "shampoo"),
    Method("KL-Shampoo", "kl-shampoo"),
    Method("SOAP", "soap"),
    Method("Muon", "muon"),
    Method("NorMuon", "normuon"),
)
PASSES = {"SGD": 5, "AdamW": 7}  # of an optimizer over vectors as long as the weights


class Network(NamedTuple):
    """A network without weights.

    Attributes:
        make: returns the network.
        inputs: of a rank's share of a batch.
        skip: modules that take Adam's step.
    """

    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    batch: int
    skip: Sequence[str] = ()


def resnet() -> nn.Module:
    """Return ResNet-50."""
    return models.build(KNOWN, classes=1000)


def vit() -> nn.Module:
    """Return ViT-B/16 for images of 224x224."""
    with stand_in():
        import timm

        return timm.create_model("vit_base_patch16_224")


def gpt() -> nn.Module:
    """Return GPT-2 small; the head has the weight of the embedding."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager"))


def images() -> Tensor:
    """Return 32 images of 224x224."""
    return torch.empty(32, 3, 224, 224)


def tokens() -> Tensor:
    """Return 8 windows of 1,024 tokens."""
    return torch.empty(8, 1024, dtype=torch.long)


# The embedding of positions is left out, as Muon has no step for a table; the tied weight of the
# embedding and the head is not covered anyway.
TABLES = ("transformer.wpe",)
NETWORKS = {
    KNOWN: Network("ResNet-50, 32 images of 224x224 a rank", resnet, images, 32),
    "vit_base": Network("ViT-B/16, 32 images of 224x224 a rank", vit, images, 32),
    "gpt2": Network("GPT-2 small, 8 windows of 1,024 tokens a rank", gpt, tokens, 8, TABLES),
}


class Work(NamedTuple):
    """The layers of a network, and the work of a step."""

    matrices: Sequence[mpikfac.LayerShape]
    uncovered: Sequence[tuple[str, tuple[int, ...]]]
    bare: Sequence[tuple[str, tuple[int, ...]]]
    forward: int
    statistics: int
    parameters: int


def work_of(network: Network) -> Work:
    """Return the shapes of a network and the operations of a batch, without any numbers."""
    with torch.device("meta"):
        model, inputs = network.make(), network.inputs()
    layers, uncovered = shapes(model, network.skip)
    bare = shapes(model, [*network.skip, *(layer.name for layer in layers)])[1]
    sums: list[int] = []
    for layer in layers:
        module = model.get_submodule(layer.name)
        module.register_forward_hook(lambda m, x, y, layer=layer: sums.append(summed(layer, y)))
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Work(layers, uncovered, bare, counter.get_total_flops(), sum(sums), parameters)


def shapes(
    model: nn.Module, skip: Sequence[str]
) -> tuple[list[mpikfac.LayerShape], list[tuple[str, tuple[int, ...]]]]:
    """Return the covered layers, and the uncovered tensors."""
    return mpikfac.layers.covered_shapes(model, mpikfac.Coverage(skip=list(skip)))


def summed(layer: mpikfac.LayerShape, output: Tensor) -> int:
    """Return the operations of the sums of outer products of a layer's inputs and outputs."""
    vectors = output.numel() // layer.outputs
    return 2 * vectors * (layer.inputs**2 + layer.outputs**2)


def scaled(machine: Machine, name: str, work: Work, known: Work) -> Machine:
    """Return the machine with the network, scaled from the known network."""
    of_known = machine.network(KNOWN, NETWORKS[KNOWN].batch)
    passes, elements = work.forward / known.forward, work.parameters / known.parameters
    network = mpikfac.predict.machine.Network(
        name,
        NETWORKS[name].batch,
        forward=of_known.forward * passes,
        backward=of_known.backward * passes,
        statistics=of_known.statistics * work.statistics / known.statistics,
        gradients=of_known.gradients * elements,
        optimizer=of_known.optimizer * elements,
    )
    return dataclasses.replace(machine, networks=(network,))


def price(machine: Machine, name: str, work: Work, method: Method, ranks: int) -> dict[str, Any]:
    """Return the predicted numbers of a method under its best strategy."""
    job = method.job(name, NETWORKS[name].batch)
    if method.preconditioner is None:
        strategy, plan, machine = first_order(machine, work, method, ranks, job)
    else:
        forms = mpikfac.preconditioners.forms(method.preconditioner)
        arguments = work.matrices, work.uncovered, ranks
        strategy, chosen = mpikfac.predict.choose(*arguments, machine, job, forms)
        plan = mpikfac.make_plan(
            work.matrices, ranks, chosen, work.uncovered, preconditioner=method.preconditioner
        )
    found = mpikfac.predict.simulate(plan, machine, job)
    counts = plan.of(0).layouts.gradients.counts()
    stepped = max(counts) / sum(counts) if plan.of(0).owner_updates else 1.0
    optimizer = FLOAT32 * method.vectors * work.parameters * stepped
    return {
        **{"machine": machine.name, "network": name, "method": method.name, "ranks": ranks},
        **{"strategy": strategy, "workers": plan.grid.workers},
        **{
            "factor_update_steps": job.factor_update_steps,
            "inv_update_steps": job.inv_update_steps,
        },
        **{"seconds": found.mean.seconds, "refresh": found.refresh.seconds},
        **{"sent": found.mean.sent, "memory": found.memory + optimizer},
        "stages": found.mean.stages,
    }


def first_order(
    machine: Machine, work: Work, method: Method, ranks: int, job: Job
) -> tuple[str, mpikfac.plan.Plan, Machine]:
    """Return the best strategy without layers by name, the plan, and the optimizer's machine."""
    network = machine.network(job.model, job.batch)
    optimizer = network.optimizer * PASSES[method.name] / PASSES["SGD"]
    network = dataclasses.replace(network, optimizer=optimizer)
    machine = dataclasses.replace(machine, networks=(network,))
    plans = {
        name: mpikfac.make_plan([], ranks, way.strategy.first_order(), work.bare)
        for name, way in NAMED.items()
        if name in ("mem-opt", "sharded-optimizer", "spd-kfac")
    }
    best = mpikfac.predict.cheapest(plans, machine, job)
    return BARE[best], plans[best], machine


BARE = {"mem-opt": "one sum", "sharded-optimizer": "owners step", "spd-kfac": "overlapped"}
"""Strategies without layers: all others are one of the three."""


def prices(name: str, asked: str, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of a network."""
    machine = mpikfac.predict.load_machine(asked)
    work, known = work_of(NETWORKS[name]), work_of(NETWORKS[KNOWN])
    machine = scaled(machine, name, work, known)
    names = {None, *PRECONDITIONERS}
    methods = [method for method in METHODS if method.preconditioner in names]
    return [
        price(machine, name, work, method, count) | {"machine": asked}
        for method in methods
        for count in ranks
    ]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a network's table, in Markdown."""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    count = middle(ranks)
    steps = " | ".join(f"ms, {number} ranks" for number in ranks)
    yield f"| method | {steps} | MB sent, {count} ranks | MB kept, {count} ranks |"
    yield "|---" * (len(ranks) + 3) + "|"
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["ranks"]: row for row in rows if row["method"] == method}
        times = " | ".join(f"{1e3 * own[n]['seconds']:.1f} `{way(own[n])}`" for n in ranks)
        sent, kept = own[count]["sent"] / 1e6, own[count]["memory"] / 1e6
        yield f"| {method} | {times} | {sent:.0f} | {kept:.0f} |"


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of one table of all networks of a machine, in Markdown."""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    names = list(dict.fromkeys(row["network"] for row in rows))
    cells = (f"{NETWORKS[name].title.partition(',')[0]}, ms | sent | kept" for name in names)
    yield f"| method | {' | '.join(cells)} |"
    yield "|---" * (3 * len(names) + 1) + "|"
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = (numbers([r for r in rows if r["network"] == n], method, ranks) for n in names)
        yield f"| {method} | {' | '.join(cells)} |"


def numbers(rows: Sequence[dict[str, Any]], method: str, ranks: Sequence[int]) -> str:
    """Return milliseconds by ranks, and MB sent and kept, of a method and network."""
    own = {row["ranks"]: row for row in rows if row["method"] == method}
    times = "/".join(f"{1e3 * own[count]['seconds']:.0f}" for count in ranks)
    row = own[middle(ranks)]
    return f"{times} | {row['sent'] / 1e6:.0f} | {row['memory'] / 1e6:.0f}"


def way(row: dict[str, Any]) -> str:
    """Return the name of a row's strategy, with the workers of a hybrid."""
    return row["strategy"] + (f" {row['workers']}" if row["strategy"] == "hybrid" else "")


def shards(row: dict[str, Any]) -> bool:
    """Return whether only owners keep the optimizer's state under a row's strategy."""
    name = {bare: name for name, bare in BARE.items()}.get(row["strategy"], row["strategy"])
    return NAMED[name].strategy.assignment.shard_optimizer


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw steps relative to SGD's, and memory, in a row per method with a marker per network."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    styles = {name: variant_style(place) | {"linestyle": ""} for place, name in enumerate(networks)}
    with styled():
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for place, name in enumerate(networks):
            own = {row["method"]: row for row in rows if row["network"] == name}
            heights = [row + 0.2 * (place - 1) for row in range(len(methods))]
            longer = [100 * (own[m]["seconds"] / own["SGD"]["seconds"] - 1) for m in methods]
            kept = [own[m]["memory"] / 1e6 for m in methods]
            panels[0].plot(longer, heights, **styles[name], markersize=6)
            for value, height, method in zip(kept, heights, methods):
                style = styles[name] if shards(own[method]) else hollow(styles[name])
                panels[1].plot(value, height, **style, markersize=6)
        panels[0].set(title="step time", xlabel="time beyond that of SGD (%)")
        panels[1].set(title="memory", xlabel="MB kept by the rank that keeps most")
        panels[0].set_yticks(range(len(methods)), methods)
        panels[0].invert_yaxis()
        panels[0].set_xlim(left=-2)
        panels[1].set_xlim(left=0)
        panels[1].xaxis.set_major_formatter("{x:,.0f}")
        machine, ranks = rows[0]["machine"], rows[0]["ranks"]
        figure.suptitle(f"Predicted for {ranks} ranks of {machine}; none of it was measured")
        titles = {NETWORKS[name].title: styles[name] for name in networks}
        whole = hollow({"color": QUIET, "marker": "o", "linestyle": ""})
        legend(figure, titles | {"hollow: every rank keeps the optimizer's state": whole}, 2)
    path.write_bytes(figure_file(figure, "svg"))


def main() -> None:
    """Print a table for each machine and network and write all rows, or draw the known rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=["a100-hdr"], help="published machines")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 512])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the known rows, predict nothing")
    options = parser.parse_args()
    if options.picture:
        rows, place = json.loads(RESULTS.read_text()), (options.machines[0], middle(options.ranks))
        draw([row for row in rows if (row["machine"], row["ranks"]) == place], options.picture)
        return
    pairs = list(itertools.product(options.machines, options.networks))
    with ProcessPoolExecutor() as pool:
        made = [pool.submit(prices, name, machine, options.ranks) for machine, name in pairs]
        rows = [future.result() for future in made]
    for (machine, name), of_network in zip(pairs, rows):
        print(f"\n{NETWORKS[name].title}, {machine}, predicted, not measured\n")
        print("\n".join(table(of_network)), flush=True)
    every = [row for of_network in rows for row in of_network]
    for machine in options.machines:
        print(f"\n{machine}\n")
        print("\n".join(summary([row for row in every if row["machine"] == machine])))
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, every)) + "\n]\n")


def middle(ranks: Sequence[int]) -> int:
    """Return the number of ranks of the columns of bytes."""
    return ranks[len(ranks) // 2]


if __name__ == "__main__":
    main()
