"""The options of a training run: names, types, defaults and bounds."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of whole numbers",
    list[str]: "a list of names",
    types.NoneType: "null",
}


def bounded(default: Any, *bounds: str) -> Any:
    """A field whose value, unless it is null, lies within `bounds` such as "> 0"."""
    return field(default=default, metadata={"bounds": bounds})


@dataclass
class DataOptions:
    """What to train on.

    Args:
        name: digits comes with the program; synthetic is made up.
        path: cifar10: where its archive was unpacked (cifar-10-batches-bin or -py).
        train_images: use only the first so many training images (synthetic: make so many).
        augment: pad by 4, crop and mirror at random.
        size: synthetic: pixels of a side.
        classes: synthetic: number of classes.
    """

    name: Literal["digits", "cifar10", "synthetic"] = "digits"
    path: str | None = None
    train_images: int | None = bounded(None, ">= 1")
    augment: bool = False
    size: int | None = bounded(None, ">= 4")
    classes: int | None = bounded(None, ">= 2")


@dataclass
class KfacOptions:
    """K-FAC; used with optimizer=kfac.

    Args:
        strategy: how it is distributed: one of those that `mpikfac strategies` lists, or auto for
            the one that takes the least time by the model. The choices from here to top_share
            change it; null leaves them as the strategy has them.
        machine: what the model and the messages of overlapping strategies go by: a file of
            `mpikfac calibrate`.
        workers: hybrid: ranks that precondition a layer; must divide the number of ranks.
        fraction: hybrid: the same as a fraction of the ranks.
        reduction: factors are averaged on every rank, on their owners, or not at all (none:
            each owner uses its own batch only).
        update: every rank steps the whole model, or the owner of a layer steps it for all.
        balance: what placement evens out over ranks.
        colocate: both factors of a layer are decomposed on the same rank.
        replicate_below: factors of a smaller order are decomposed by all workers of their layer.
        reduce_at: ranks average factors with each other whenever there are new ones, or (bases)
            only before these are decomposed.
        packing: factors travel as triangles or as full squares.
        fusion: layers that share a message; one number, or that of each message in turn.
        stagger: a refresh of the bases is spread over so many steps, a share of the layers each.
        delay: steps after which a decomposition, made in the background, is used.
        curvature_ranks: the last so many ranks of the job do not train but decompose for the
            others; batch and learning rate are those of the ranks that train. Needs delay.
        tolerance: factors are decomposed anew only if the last decomposition is off by more than
            this, relative; 0 for always.
        overlap: sums are sent beside the backward pass, in messages as fusion or machine says.
        sums: how owners come to sums: MPI reduces, or (alltoall) they are sent parts and add them.
        ranks_per_node: consecutive ranks that share a node: they add up what leaves it, and pass on
            to each other what comes to it.
        factor_wire: factors are rounded to it to travel; null leaves them as they are.
        basis_wire: the same of decompositions.
        gradient_wire: the same of gradients, or only the largest of them travel (top-k).
        top_share: of the gradients, those that travel with top-k.
        damping: Tikhonov damping.
        relative_damping: it is relative to the mean eigenvalue of each layer's curvature.
        damping_adapt: steps between two changes of the damping by how well the quadratic model
            predicted the loss, at the price of a forward pass each; null for none.
        factor_every: steps between two updates of the factors.
        basis_every: steps between two decompositions; null as the strategy has it (most: 10).
        decay: coefficient of the factors' running average.
        kl_clip: bound on a step's squared Fisher norm; null for none.
        norm_clip: bound on the norm of all directions together instead; null for none.
        graft: each layer's direction gets the length of its gradient (sgd), or of Adam's step but
            for momentum (adam); null for its own.
        solver: damped inverses with the damping split between both factors, eigenbases, these with
            eigenvalues of single images' gradients (ekfac), inverses with all of the damping in
            each, or mean vectors in the place of factors (rank-one, as eva has it); null as the
            strategy has it (most: inverse).
        normalization: scaling of the factors.
        start: running averages start at the first factor or at the identity.
        fisher: whose gradients make up the output factors: those at the images' labels (empirical);
            at labels that the network gives, drawn (sampled) or all of them (exact); or none.
        samples: how often labels are drawn with fisher=sampled.
        norms: normalisation layers are preconditioned, too.
        sharing: the positions at which an image uses a weight count as examples of their own
            (expand), or their mean does (reduce).
        largest: factors of a larger order fall into equal blocks; null for no such order.
        rank: of factors (or blocks) of a larger order only so many eigenvectors are kept, the rest
            counts with its mean eigenvalue; null for all. Needs solver=eigen.
        subsample: factors are estimated from every n-th image of a batch.
        statistics_dtype: inputs of convolutions are rounded to it before they are multiplied.
        factor_dtype: running averages of factors are kept in it.
        basis_dtype: decompositions are kept in it and sent so; gradients are multiplied in it.
        skip: names of layers that are trained without K-FAC.
    """

    strategy: str = "comm-opt"
    machine: str | None = None
    workers: int | None = bounded(None, ">= 1")
    fraction: float | None = bounded(None, "> 0", "<= 1")
    reduction: Literal["everyone", "owners", "none"] | None = None
    update: Literal["everyone", "owner"] | None = None
    balance: Literal["compute", "memory"] | None = None
    colocate: bool | None = None
    replicate_below: int | None = bounded(None, ">= 0")
    reduce_at: Literal["factors", "bases"] | None = None
    packing: Literal["triangle", "square"] | None = None
    fusion: list[int] | None = None
    stagger: int | None = bounded(None, ">= 1")
    delay: int | None = bounded(None, ">= 0")
    curvature_ranks: int | None = bounded(None, ">= 0")
    tolerance: float | None = bounded(None, ">= 0")
    overlap: bool | None = None
    sums: Literal["reduce", "alltoall"] | None = None
    ranks_per_node: int | None = bounded(None, ">= 1")
    factor_wire: Literal["bfloat16", "int8"] | None = None
    basis_wire: Literal["bfloat16", "int8"] | None = None
    gradient_wire: Literal["bfloat16", "int8", "top-k"] | None = None
    top_share: float | None = bounded(None, "> 0", "<= 1")
    damping: float = bounded(0.003, "> 0")
    relative_damping: bool = False
    damping_adapt: int | None = bounded(None, ">= 1")
    factor_every: int = bounded(1, ">= 1")
    basis_every: int | None = bounded(None, ">= 1")
    decay: float = bounded(0.95, ">= 0", "< 1")
    kl_clip: float | None = bounded(0.001, "> 0")
    norm_clip: float | None = bounded(None, "> 0")
    graft: Literal["sgd", "adam"] | None = None
    solver: Literal["inverse", "eigen", "ekfac", "unsplit-inverse", "rank-one"] | None = None
    normalization: Literal["expand", "sc20", "kfac-pytorch"] = "expand"
    start: Literal["first", "identity"] = "first"
    fisher: Literal["empirical", "sampled", "exact", "forward-only"] = "empirical"
    samples: int = bounded(1, ">= 1")
    norms: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    largest: int | None = bounded(None, ">= 1")
    rank: int | None = bounded(None, ">= 1")
    subsample: int = bounded(1, ">= 1")
    statistics_dtype: Literal["bfloat16"] | None = None
    factor_dtype: Literal["bfloat16"] | None = None
    basis_dtype: Literal["bfloat16"] | None = None
    skip: list[str] = field(default_factory=list)


@dataclass
class Options:
    """Trains a network with K-FAC, SGD or AdamW; start it under mpirun or srun.

    Args:
        optimizer: K-FAC preconditions SGD's gradient; SGD and AdamW are the baselines.
        model: digits_cnn; resnet20, resnet32, resnet44, resnet56, resnet110, mobilenet_small or
            vit_small (for 32x32 pixels); resnet18, resnet34, resnet50, resnet101 or resnet152 (for
            ImageNet).
        data: the data set.
        kfac: the settings of K-FAC.
        batch: images of a step, of all ranks together; must be a multiple of their number.
        batch_per_rank: the same per rank; give one of the two. A run that goes on with other ranks
            keeps the batch that it began with.
        parts: a batch is dealt out in so many parts, whose gradients are added in order: results
            are then the same to the last bit on every number of ranks that divides it. Layers that
            normalise a batch normalise each part by itself.
        epochs: passes over the training images; schedules refer to this.
        max_steps: stop early after so many steps; --resume auto goes on from there.
        lr: learning rate; 0.1 suits SGD and K-FAC, 0.001 AdamW and kfac.graft=adam.
        scale_lr: multiply lr by the number of ranks that the run began on; warm-up then starts at
            lr itself.
        warmup_epochs: the learning rate rises linearly during these.
        schedule: constant, multiplied by decay_factor at decay_epochs (step), or falling linearly
            to 0 at the end.
        decay_epochs: schedule=step: when.
        decay_factor: schedule=step: by how much.
        momentum: of SGD; AdamW's beta1.
        weight_decay: of SGD, an L2 penalty; AdamW's is decoupled from the gradient.
        seed: of initial weights, order and augmentation.
        run_dir: where configuration, log, metrics and checkpoints go.
        resume: never, auto (from the newest checkpoint in run_dir if there is one), or the path of
            a checkpoint to start from.
        checkpoint_minutes: between checkpoints, which are written beside the training; null for
            none. One is always written at the end.
        checkpoint_every: steps between checkpoints, in addition; null for none.
        max_time: minutes after which the job is ended by somebody else; the run writes a checkpoint
            and stops in time. SLURM_JOB_END_TIME says the same.
        stop_code: exit code of a run that was asked to stop before its end, by SIGTERM, SIGUSR1,
            SIGUSR2, RUN_DIR/control/stop or the end of the job.
        hang_after: seconds that a step may take; a job that takes longer is ended, and every rank's
            stack is in RUN_DIR/hang. Start-up, evaluation and checkpoints may take 10 times that.
            null for ever.
        shrink: when a rank dies, the others go on without it (under mpirun --with-ft ulfm).
        log_every: steps between two lines of metrics.
        trace_steps: record the stages of so many steps, after the first two of this start, on every
            rank: a table in the log, RUN/trace.json.gz for a browser, RUN/stages.json. null: none.
        device: auto takes a GPU where there is one.
        threads: per rank; null shares a node's cores, or obeys OMP_NUM_THREADS.
        tensorboard: write TensorBoard events too.
    """

    optimizer: Literal["kfac", "sgd", "adamw"] = "kfac"
    model: str = "digits_cnn"
    data: DataOptions = field(default_factory=DataOptions)
    kfac: KfacOptions = field(default_factory=KfacOptions)
    batch: int | None = bounded(None, ">= 1")
    batch_per_rank: int | None = bounded(None, ">= 1")
    parts: int | None = bounded(None, ">= 1")
    epochs: int = bounded(10, ">= 1")
    max_steps: int | None = bounded(None, ">= 1")
    lr: float = bounded(0.1, "> 0")
    scale_lr: bool = False
    warmup_epochs: float = bounded(0.0, ">= 0")
    schedule: Literal["constant", "step", "linear"] = "linear"
    decay_epochs: list[int] = field(default_factory=list, metadata={"bounds": (">= 1",)})
    decay_factor: float = bounded(0.1, "> 0", "<= 1")
    momentum: float = bounded(0.9, ">= 0", "< 1")
    weight_decay: float = bounded(0.0005, ">= 0")
    seed: int = bounded(0, ">= 0", "< 4294967296")
    run_dir: str = "runs/train"
    resume: str = "never"
    checkpoint_minutes: float | None = bounded(15.0, "> 0")
    checkpoint_every: int | None = bounded(None, ">= 1")
    max_time: float | None = bounded(None, "> 0")
    stop_code: int = bounded(0, ">= 0", "<= 255")
    hang_after: float | None = bounded(600.0, "> 0")
    shrink: bool = False
    log_every: int = bounded(10, ">= 1")
    trace_steps: int | None = bounded(None, ">= 1")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = bounded(None, ">= 1")
    tensorboard: bool = False


def _options(group: type, prefix: str = "") -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Dotted key, type and bounds of every option."""
    hints = typing.get_type_hints(group)
    for option in dataclasses.fields(group):
        kind = hints[option.name]
        if dataclasses.is_dataclass(kind):
            yield from _options(kind, f"{prefix}{option.name}.")
        else:
            yield prefix + option.name, kind, option.metadata.get("bounds", ())


OPTIONS = {key: (kind, bounds) for key, kind, bounds in _options(Options)}


def allowed(key: str) -> str:
    """What an option may be, in words."""
    kind, bounds = OPTIONS[key]
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    first, *others = (
        f"one of {', '.join(typing.get_args(k))}" if typing.get_origin(k) is Literal else WORDS[k]
        for k in kinds
    )
    return " or ".join([" ".join([first, " and ".join(bounds)]).strip(), *others])


def unknown(key: str) -> str:
    """Return the message about an unknown key, with a name that is close to the key."""
    close = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.8)
    if close:
        return f"unknown key {key}; did you mean {close[0]}?"
    group = key.rpartition(".")[0]
    inside = [known for known in OPTIONS if known.rpartition(".")[0] == group]
    return f"unknown key {key}; known are {', '.join(inside or OPTIONS)}"
