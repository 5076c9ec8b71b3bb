"""Check which layers of a model K-FAC covers, and compare their results with autograd.

    mpikfac check resnet20
    mpikfac check my_models.py:build --input 3,32,32
    mpikfac check my_models.py:translator --input 16 --tokens 1000
    mpirun -n 2 mpikfac check resnet20      # also compares strategies with a single process

A model's file can define COVERS, which is passed to `Coverage` as `covers`. The exit code is 1 if a
result is wrong.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn

import mpikfac
from mpikfac.preconditioners import Inverse
from mpikfac_apps.checking import reference
from mpikfac_apps.checking.comparison import (
    LARGEST_PRODUCT,
    STEPS,
    STRATEGIES,
    Finding,
    alike,
    differences,
    findings_of,
)
from mpikfac_apps.checking.model import Subject, check_passes, named_subject
from mpikfac_apps.checking.options import CHECK, CheckOptions
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.options.options import KfacOptions
from mpikfac_apps.options.strategy import ITEMSIZE
from mpikfac_apps.place import share_cores
from mpikfac_apps.planning.budget import foreseen
from mpikfac_apps.planning.facts import KINDS_OF_STEP, looked_at, orders_of, strategy_of
from mpikfac_apps.text import mib, number, show, table

QUANTITIES = ("A", "G", "gradient", *reference.SOLVES)
WIDTH = 96


def main(argv: list[str] | None = None) -> int:
    """Print the findings about a model; return 1 if a result is wrong, otherwise 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    return run_on_ranks(lambda _: CHECK.read(argv), lambda comm, options, _: check(comm, options))


def check(comm: mpikfac.comm.Comm, options: CheckOptions) -> int:
    """Print all sections on rank 0; return 1 if a result is wrong, otherwise 0.

    Collective over: comm.

    Raises:
        UserError: the model cannot be built, or cannot be used with the options.
    """
    share_cores(comm, None)
    return int(checked(comm, options))


def checked(comm: mpikfac.comm.Comm, options: CheckOptions) -> bool:
    """Print all sections on rank 0; return whether a result is wrong.

    Collective over: comm.

    Raises:
        UserError: the model cannot be built, or cannot be used with the options.
    """
    alone, doing = cast(mpikfac.comm.Comm, comm.Split(comm.rank)), f"check {options.model}"
    findings: dict[str, Finding] = {}
    with mpikfac.comm.together(comm, doing):
        subject = named_subject(options.model, options.input, options.classes, options.tokens)
        check_passes(subject, options.batch, comm.size)
    subject.model.load_state_dict(comm.bcast(subject.model.state_dict()))
    with mpikfac.comm.together(comm, doing):
        if comm.rank == 0:
            findings = findings_of(subject, alone, options.batch)
    strategy_errors = differences(comm, alone, subject, options.batch) if comm.size > 1 else {}
    if comm.rank == 0:
        ranks = options.ranks or (comm.size if comm.size > 1 else 4)
        show(
            [
                *coverage(subject, findings),
                numbers(findings, options.batch),
                strategies(comm.size, strategy_errors),
                [*plans(subject, ranks), *cost(subject, options.batch)],
                verdict(findings, strategy_errors),
            ]
        )
    wrong = any(finding.wrong for finding in findings.values())
    return comm.bcast(wrong) or not all(map(alike, strategy_errors.values()))


# -- sections ------------------------------------------------------------------------------------


def coverage(subject: Subject, findings: Mapping[str, Finding]) -> list[list[str]]:
    """Return lines that list the covered modules, and the reasons why others are not covered."""
    layers, rest = mpikfac.layers.cover(subject.model, subject.coverage)
    ties = {name.rpartition(".")[0]: other.ties for other in rest for name in other.ties}
    inside = {id(parameter) for layer in layers for parameter in layer.parameters}
    covered = [("layer", "module", "factors")]
    others: dict[tuple[str, str], list[str]] = {}
    for name, module in subject.model.named_modules():
        kind = type(module).__name__
        by = [layer for layer in layers if any(module is member for member in layer.modules)]
        for layer in by:
            is_layer_module = module is layer.module
            how = form(layer.shape) if is_layer_module else f"weights of {layer.name}"
            how += "" if findings[layer.name].vectors else "; not used in this batch"
            covered.append((shown(layer.name if is_layer_module else name), kind, how))
        if not by and any(id(p) not in inside for p in module.parameters(recurse=False)):
            why = why_not(name, module, subject, ties.get(name, ()))
            others.setdefault((kind, why), []).append(named(name, module))
    uncovered = [
        line
        for (kind, why), names in others.items()
        for line in [f"  {kind}: {why}", *wrapped(names)]
    ]
    return [
        ["Covered: orders of the factors A and G", *table(covered, left=3)],
        ["Not covered", *uncovered] if uncovered else ["Not covered: nothing"],
    ]


def named(name: str, module: nn.Module) -> str:
    """Return a module's name, or the names of its own parameters if it has children."""
    parameters = (parameter for parameter, _ in module.named_parameters(recurse=False))
    names = [f"{name}.{parameter}".lstrip(".") for parameter in parameters]
    return ", ".join(names) if list(module.children()) else shown(name)


def wrapped(names: Sequence[str]) -> list[str]:
    """Return names as wrapped and indented lines."""
    text, indent = ", ".join(names), " " * 4
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def form(layer: mpikfac.LayerShape) -> str:
    """Describe a layer's factors by their orders, such as "A 27, G 16" or "A 16 x 9, G 16 x 1"."""
    sides = []
    for side in layer.sides:
        factors = layer.side(side)
        order = orders_of(factors)
        dense = side not in layer.diagonal
        sides.append(f"{side} {order}" if dense else f"{side} diagonal of {factors[0].size}")
    return ", ".join(sides)


def why_not(name: str, module: nn.Module, subject: Subject, ties: Sequence[str]) -> str:
    """Return the reason why a module is not covered.

    Args:
        ties: all names of the parameter that the module shares with modules of another kind.
    """
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return "frozen"
    if name in subject.refused:
        return subject.refused[name]
    if ties:
        shared = " = ".join(ties)
        return f"trained first-order, because no layer covers all modules that share {shared}"
    if type(module) in mpikfac.NORMS:
        return (
            "trained first-order; coverage=mpikfac.Coverage(covers={**mpikfac.KINDS, "
            "**mpikfac.NORMS}) covers the module"
        )
    covers = subject.coverage.covers
    if mpikfac.layers.same_as(module, covers):
        return f"trained first-order; {mpikfac.layers.offer(type(module), covers)}"
    if base := mpikfac.layers.covered_base(type(module), covers):
        return f"trained first-order; derived from {base.__name__}, but may compute differently"
    return "trained first-order"


def numbers(findings: Mapping[str, Finding], examples: int) -> list[str]:
    """Return lines about the errors of each covered layer."""
    rows = [("layer", "vectors", *QUANTITIES, "")]
    for name, finding in findings.items():
        cells = [f"{finding.errors[q]:.0e}" if q in finding.errors else "-" for q in QUANTITIES]
        rows.append((shown(name), str(finding.vectors), *cells, judged(finding)))
    return [
        f"Errors: relative, in float64, {number(examples, 'example')}",
        "  A, G: recorded factors, compared with those of the vectors that the module itself uses",
        "  gradient: sums of g a^T, compared with autograd for each example and for the model",
        "  eigen, inverse: preconditioners, compared with dense solves up to order "
        f"{LARGEST_PRODUCT:,}",
        *table(rows),
    ]


def judged(finding: Finding) -> str:
    """Return the verdict on a layer, such as "ok" or "WRONG: G"."""
    if not finding.vectors:
        return "no vectors"
    if finding.wrong:
        return f"WRONG: {', '.join(finding.wrong)}"
    return "too large for the reference computation" if finding.large else "ok"


def strategies(ranks: int, errors: Mapping[str, float]) -> list[str]:
    """Return lines about how much the weights of each strategy differ from those of one process."""
    if not errors:
        return ["Strategies: not compared; run the check under mpirun with at least 2 ranks"]
    rows = [("strategy", "difference", "")]
    rows += [(name, f"{off:.0e}", "ok" if alike(off) else "WRONG") for name, off in errors.items()]
    return [
        f"Strategies: weights after {STEPS} steps on {ranks} ranks, compared with one process that",
        "  uses all examples. Differences are relative to the largest change of a weight; only",
        "  covered layers are in train() mode",
        *table(rows),
    ]


def plans(subject: Subject, ranks: int) -> list[str]:
    """Return lines about the memory that each strategy needs, and the bytes that it sends."""
    layers, others = mpikfac.layers.covered_shapes(subject.model, subject.coverage)
    rows: list[tuple[str, ...]] = [
        ("strategy", "workers", "kept: least", "most", "sent: plain", "factors", "bases")
    ]
    for name in STRATEGIES:
        strategy, preconditioner = strategy_of(name, ranks, Inverse())
        plan = mpikfac.make_plan(layers, ranks, strategy, others, preconditioner, ITEMSIZE)
        looked = looked_at(plan)
        memory = [sum(plan.memory(rank).values()) for rank in looked]
        sent = [
            max(sum(message.wire for message in plan.messages(rank, *kind)) for rank in looked)
            for _, *kind in KINDS_OF_STEP
        ]
        rows.append((name, str(plan.grid.workers), *map(mib, (min(memory), max(memory), *sent))))
    return [
        f"Plans for {number(ranks, 'rank')}, in MiB of float32. Kept: what a rank stores for",
        "  K-FAC. Sent: the maximum that a rank sends in a plain step, in a step with new",
        "  factors, or in a step with new factors and bases",
        *table(rows),
    ]


def cost(subject: Subject, examples: int) -> list[str]:
    """Return lines about the operations of a step on one rank; if there are many, add a remedy."""
    model, (inputs, _) = subject.copied(), subject.batch(examples, seed=0)
    layers, others = mpikfac.layers.cover(model, subject.coverage)
    calls = mpikfac.layers.call_sizes(model, layers, inputs)
    kfac, shapes = KfacOptions(), [layer.shape for layer in layers]
    tensors = [(other.name, tuple(other.tensor.shape)) for other in others]
    plan = mpikfac.make_plan(shapes, 1, mpikfac.Strategy(), tensors)
    run = foreseen(kfac, Inverse(), {}, (shapes, tensors), plan, calls, 1)
    remedy = (
        "use a larger batch; divide factors into smaller blocks, with a rule in mpikfac.Coverage "
        "that sets a smaller `largest`; or set grafting=mpikfac.AdamGrafting(orthogonalize=False)"
    )
    texts = [f"One rank, {number(examples, 'example')}: {run.line}"] if run.line else []
    if run.times > 2:
        texts.append(f"To reduce them: {remedy}")
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def verdict(findings: Mapping[str, Finding], strategy_errors: Mapping[str, float]) -> list[str]:
    """Return the verdict on all layers and strategies, naming those that are wrong."""
    layers = [shown(name) for name, finding in findings.items() if finding.wrong]
    wrong = layers + [name for name, off in strategy_errors.items() if not alike(off)]
    judged = sum(bool(finding.errors) for finding in findings.values()) + len(strategy_errors)
    return [f"WRONG: {', '.join(wrong)}" if wrong else f"All right: {judged} of {judged} checked"]


def shown(name: str) -> str:
    """Return a module's name, or "(model)" for the model itself."""
    return name or "(model)"
