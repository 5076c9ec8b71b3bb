"""The options of a training run and of the programs that plan one, as groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpikfac import Clip, Damping, Estimator, Strategy
from mpikfac.solvers import SOLVERS
from mpikfac_apps.options.fields import bounded, changes, choice, inline, listed
from mpikfac_apps.problems.datasets import DATASETS
from mpikfac_apps.problems.models import MODELS


@dataclass(frozen=True)
class DataOptions:
    """The data set.

    Args:
        name: digits: comes with the program; synthetic: random images.
        path: cifar10: the directory in which the archive was unpacked (cifar-10-batches-bin or
            cifar-10-batches-py).
        train_images: the number of training images to take from the start, or to make (synthetic);
            null for all.
        augment: training images are padded by 4, cropped and mirrored at random.
        size: synthetic: the pixels of a side.
        classes: synthetic: the number of classes.
    """

    name: str = choice("digits", DATASETS)
    path: str | None = None
    train_images: int | None = bounded(None, ">= 1")
    augment: bool = False
    size: int | None = bounded(None, ">= 4")
    classes: int | None = bounded(None, ">= 2")


@dataclass(frozen=True)
class Distribution:
    """How K-FAC is distributed.

    Args:
        strategy: a name that `mpikfac strategies` lists, or auto: the strategy that takes the least
            time by the model of a machine.
        fraction: the workers of a layer as a share of the ranks, in the place of their number.
        change: choices that replace the choices of the name; null leaves a choice as the strategy
            has it.
    """

    strategy: str = "comm-opt"
    fraction: float | None = bounded(None, "> 0", "<= 1")
    change: Mapping[str, Any] = changes(Strategy, without=("parts",))


@dataclass(frozen=True)
class CoverageOptions:
    """Which layers K-FAC covers, and in what form.

    Args:
        norms: scale and shift of normalisation layers are preconditioned, too.
        sharing: the positions at which an image uses a weight count as examples of their own
            (expand), or their mean counts (reduce).
        largest: a factor of a larger order falls into equal blocks; null for no limit.
        rank: the number of eigenvectors that are kept of factors or blocks of a larger order; the
            mean replaces all other eigenvalues. null: all are kept. Needs solver=eigen.
        skip: names of layers that are trained without K-FAC.
    """

    norms: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    largest: int | None = bounded(None, ">= 1")
    rank: int | None = bounded(None, ">= 1")
    skip: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KfacOptions:
    """K-FAC.

    Args:
        machine: a file of `mpikfac calibrate`: overlapped strategies take the length of their
            messages from it, and strategy=auto takes everything.
        damping_adapt: steps between two changes of the damping by how well the quadratic model
            predicted the loss, at the price of a forward pass each; null for none.
        factor_every: steps between two updates of the factors.
        basis_every: steps between two decompositions; null: as the strategy has it (most: 10).
        solver: how gradients are preconditioned; null: as the strategy has it (most: inverse).
            inverse: damped inverses, the damping split between both factors; eigen: eigenbases;
            ekfac: eigenbases with eigenvalues of the gradients of single images; unsplit-inverse:
            inverses with all of the damping in each factor; rank-one: mean vectors in the place of
            factors, as Eva.
        basis_dtype: decompositions are kept and sent in the dtype, and gradients multiplied in it.
    """

    distribution: Distribution = inline(Distribution)
    machine: str | None = None
    damping: Damping = inline(Damping, value="damping", relative="relative_damping")
    damping_adapt: int | None = bounded(None, ">= 1")
    factor_every: int = bounded(1, ">= 1")
    basis_every: int | None = bounded(None, ">= 1")
    solver: str | None = choice(None, SOLVERS)
    basis_dtype: Literal["bfloat16"] | None = None
    clip: Clip = inline(Clip, kl="kl_clip", norm="norm_clip")
    estimator: Estimator = inline(Estimator)
    coverage: CoverageOptions = inline(CoverageOptions)


@dataclass(frozen=True)
class Options:
    """Train a network with K-FAC, SGD or AdamW; start the program under mpirun or srun.

    Args:
        optimizer: kfac: SGD with gradients that K-FAC preconditions; sgd and adamw: the baselines.
        model: a network.
        data: the data set.
        kfac: the settings of K-FAC.
        batch: the images of a step, of all ranks together; a multiple of the number of ranks.
        batch_per_rank: the images of a step on each rank; give batch or batch_per_rank. A run that
            is resumed on another number of ranks keeps the batch.
        parts: the number of parts that a batch is dealt out in. Gradients of parts are added in
            order, so the result has the same bits on every number of ranks that divides the number
            of parts. Layers that normalise a batch normalise each part by itself. null: MPI adds.
        epochs: passes over the training images; schedules have this length.
        max_steps: the run stops after so many steps, and --resume auto continues the run; null for
            no limit.
        lr: the learning rate; 0.1 suits SGD and K-FAC, 0.001 suits AdamW and kfac.graft=adam.
        scale_lr: lr is multiplied by the number of ranks at the first start; a warm-up then starts
            at lr.
        warmup_epochs: epochs at the start in which the learning rate rises linearly.
        schedule: the learning rate is constant, falls by decay_factor at decay_epochs (step), or
            falls linearly to 0 at the end (linear).
        decay_epochs: schedule=step: the epochs at which the learning rate falls.
        decay_factor: schedule=step: the factor by which the learning rate falls.
        momentum: the momentum of SGD; beta1 of AdamW.
        weight_decay: SGD: an L2 penalty; AdamW: decoupled from the gradient.
        seed: for initial weights, order of images and augmentation.
        run_dir: the directory for configuration, log, metrics and checkpoints.
        resume: never; auto: from the newest checkpoint in run_dir, if there is a checkpoint; or the
            path of a checkpoint.
        checkpoint_minutes: minutes between checkpoints, which are written in the background; null
            for none. The end of a run always writes a checkpoint.
        checkpoint_every: steps between further checkpoints; null for none.
        max_time: minutes from the start to the end of the job; the run writes a checkpoint and
            stops in time. SLURM_JOB_END_TIME has the same effect. null for no limit.
        stop_code: the exit code of a run that was stopped before the end by SIGTERM, SIGUSR1,
            SIGUSR2, RUN_DIR/control/stop or the end of the job.
        hang_after: the longest time of a step, in seconds. A longer step ends the job and leaves
            the stack of every rank in RUN_DIR/hang. Start, evaluation and checkpoints may take 10
            times as long. null for no limit.
        shrink: when a rank dies, the other ranks continue (under mpirun --with-ft ulfm).
        log_every: steps between two lines of metrics.
        trace_steps: the number of steps whose stages are recorded on every rank, after the first
            two steps of this start: a table in the log, RUN_DIR/trace.json.gz for a browser,
            RUN_DIR/stages.json. null for none.
        device: auto takes a GPU if there is a GPU.
        threads: threads of a rank; null: OMP_NUM_THREADS, or an equal share of the node's cores.
        tensorboard: TensorBoard events are written, too.
    """

    optimizer: Literal["kfac", "sgd", "adamw"] = "kfac"
    model: str = listed(MODELS, "digits_cnn")
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

    @property
    def step_batch(self) -> int:
        """The images of a step, of all ranks together, once the number of ranks is known."""
        assert self.batch is not None, "`parse` fills in the batch"
        return self.batch


BASIC = (
    *("optimizer", "model", "data.name", "data.path", "data.augment", "batch", "batch_per_rank"),
    *("epochs", "max_steps", "lr", "warmup_epochs", "schedule", "momentum", "weight_decay", "seed"),
    *("run_dir", "resume", "checkpoint_minutes", "max_time", "log_every", "trace_steps", "device"),
    *("kfac.strategy", "kfac.workers", "kfac.damping", "kfac.factor_every", "kfac.basis_every"),
    *("kfac.solver", "kfac.kl_clip"),
)
"""The options that a newcomer needs, which `--help` shows."""
