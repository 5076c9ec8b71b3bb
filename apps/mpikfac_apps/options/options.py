"""The options of a training run, in groups that planning programs use as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mpikfac.lab  # noqa: F401 (makes its methods available by name)
from mpikfac import (
    AdamGrafting,
    CommOpt,
    Compression,
    Damping,
    Estimator,
    Refresh,
    Strategy,
    Synchronous,
    Transport,
    get_strategy,
)
from mpikfac.plan import (
    FACTOR_EVERY,
    NAMED,
    Assignment,
    Clip,
    Grafting,
    NoGrafting,
    Synchronization,
)
from mpikfac.preconditioners import Preconditioner
from mpikfac.settings import MOMENTUM, RATE, WEIGHT_DECAY, Precision, Schedule
from mpikfac_apps.options import joints
from mpikfac_apps.options.by_epoch import ByEpoch, at_start
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import (
    TYPE,
    bounded,
    flat,
    in_home,
    inline,
    leaves,
    listed,
    section,
)
from mpikfac_apps.options.run import END, LENGTH, LOG, RunOptions
from mpikfac_apps.options.sources import Presets

# Names from tables whose code needs torch; tests compare them with the tables.
DATASETS = (
    *("digits", "cifar10", "cifar100", "curves", "patches", "synthetic", "folder", "packed"),
    *("text", "volume"),
)
"""The names in `problems.datasets.DATASETS`."""
MODELS = (
    *("digits_cnn", "mobilenet_small", "airbench94", "vit_small"),
    *("resnet20", "resnet32", "resnet44", "resnet56", "resnet110"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("autoencoder", "autoencoder_small", "gpt_small", "lstm_small"),
    "segmenter3d",
)
"""The names in `problems.models.MODELS`."""


@dataclass(frozen=True)
class DataOptions:
    """The data set.

    Args:
        name: the data set. "digits": handwritten digits, installed with the program; "cifar10" and
            "cifar100": the files in data.path; "patches": grey patches of cifar10, for
            autoencoders; "curves": generated smooth curves, for autoencoders; "synthetic": random
            images; "text": the bytes of text files, for language models; "volume": crops of a
            brain, for segmenters; "folder": a folder of images; "packed": a file written by
            `mpikfac pack`; FILE.py:FUNCTION: the tensors that your function returns. Names.
        path: the directory with the unpacked archive of cifar10 or cifar100; the folder with
            train/CLASS/*.jpg and val/CLASS/*.jpg; the file written by `mpikfac pack`; a text file,
            or a directory with *.py and *.txt files, null for Python's standard library; or the
            folder with a volume's image.nii.gz and labels.nii.gz, null for nilearn's MNI152.
        train_images: the number of training images to use: the first images of the data set; for a
            folder or a packed file, evenly spaced images; for curves and synthetic images, the
            number to generate; for a text, the number of windows. null for all images or windows,
            20,000 curves or 1024 synthetic images.
        test_images: the number of test images to use, chosen in the same way; null for all images.
            Fewer images make evaluations faster but less precise.
        augment: shift and mirror training images at random; gaps are filled with black pixels. For
            images in files, a random crop is rescaled, and mirrored at random.
        shift: the maximum number of pixels by which augment shifts an image in each direction; null
            for 4.
        mirror: how augment mirrors images. null: half of the images, at random; "alternating":
            each image in every second epoch, beginning at random with the first or the second.
        mixup: alpha of mixup: each training image becomes a weighted mean of two images, and its
            loss is the mean of their losses with the same weights; each step draws the weight from
            Beta(alpha, alpha). null for none.
        cutmix: alpha of cutmix: a box in each training image shows another image, and the loss
            weights both labels by their areas; each step draws the fraction of the area from
            Beta(alpha, alpha). With both mixup and cutmix, each step chooses one of them at random.
            null for none.
        size: for patches, synthetic images and crops of images in files, the side length in pixels
            (null for 28, 32 and 224, respectively); for a text, the length of a window in bytes
            (null for 64); for a volume, the side length of a crop in voxels (null for 16).
        classes: the number of classes of synthetic images; null for 10.
        workers: the number of processes per rank that decode images in files in advance; with 0,
            the rank decodes them itself; null for 2. Results do not depend on this number.
        max_broken_images: the maximum number of broken images in files. A broken image is replaced
            by the next image of its class, and logged; one more broken image ends the run. null for
            0.
        cache: a directory on the disk of each node, to which one rank of each node copies the
            images of a packed file before training. null for no copy.
    """

    name: str = section("data", listed(DATASETS, "digits"))
    path: str | None = in_home(None)
    train_images: int | None = bounded(None, ">= 1")
    test_images: int | None = bounded(None, ">= 1")
    augment: bool = False
    shift: int | None = bounded(None, ">= 0", "<= 16")
    mirror: Literal["alternating"] | None = None
    mixup: float | None = bounded(None, "> 0")
    cutmix: float | None = bounded(None, "> 0")
    size: int | None = bounded(None, ">= 4")
    classes: int | None = bounded(None, ">= 2")
    workers: int | None = bounded(None, ">= 0", "<= 256")
    max_broken_images: int | None = bounded(None, ">= 0")
    cache: str | None = in_home(None)


@dataclass(frozen=True)
class GroupOptions:
    """Groups of ranks that learn from each other's predictions [codistillation].

    Args:
        groups: the number of groups of ranks. Each group trains its own model in
            RUN_DIR/group-NUMBER, with the seed `seed + NUMBER` and its own batches, and learns
            from the predictions of the other groups. 1: all ranks train one model.
        burn_in: the number of initial steps in which groups train independently; null for all steps
            of the first epoch.
        swap_every: the number of steps from one swap of weights between groups to the next.
        distill_weight: the weight, in the loss, of the divergence from the other groups'
            predictions; with 0, groups train independently.
    """

    groups: int = bounded(1, ">= 1")
    burn_in: int | None = bounded(None, ">= 0")
    swap_every: int = bounded(50, ">= 1")
    distill_weight: float = bounded(1.0, ">= 0")


AUTO = "auto"
COMM_OPT = "comm-opt"


@dataclass(frozen=True)
class StrategyOptions:
    """The strategy: a published method of distributing training over ranks.

    Without K-FAC, choices about factors and decompositions have no effect.

    Args:
        strategy: the name of a strategy; `mpikfac strategies` lists all names. The strategy sets
            the defaults of the assignment, sync, compression, refresh and transport options.
            "auto" chooses the K-FAC strategy with the shortest predicted time on `machine`.
        machine: a measured machine: a file written by `mpikfac calibrate`, or the name of a
            published machine, as for `mpikfac simulate`. Overlapped strategies choose their
            messages for the machine, and strategy=auto chooses everything.
        split_layers: the layers whose channels are divided among groups of ranks: NAME=outputs or
            NAME=inputs for each layer, or only "auto" for the cheapest distribution of each layer,
            measured in seconds on `machine`, or in bytes if there is no machine.
        tp_size: the number of ranks in a group that divides layers; null for all ranks or, with
            split_layers=auto, for the cheapest number.
        assignment: which ranks decompose factors, precondition gradients and update weights.
        sync: what ranks exchange to train one model, and when.
        compression: how values are encoded in messages.
        refresh: when factors are decomposed, and by which ranks.
        transport: when values are sent, and in which messages.
    """

    strategy: str = section("strategy", field(default=COMM_OPT))
    machine: str | None = None
    split_layers: list[str] | str = field(default_factory=list)
    tp_size: int | None = bounded(None, ">= 2")
    assignment: Assignment = field(default_factory=CommOpt)
    sync: Synchronization = field(default_factory=Synchronous)
    compression: Compression = field(default_factory=Compression)
    refresh: Refresh = field(default_factory=Refresh)
    transport: Transport = field(default_factory=Transport)

    @property
    def split(self) -> list[str]:
        """The entries of `split_layers`."""
        return [self.split_layers] if isinstance(self.split_layers, str) else self.split_layers

    @property
    def chosen(self) -> Strategy:
        """The strategy.

        Raises:
            ValueError: choices cannot be combined.
        """
        return Strategy(*(getattr(self, joint) for joint in JOINTS))

    def renamed(self, name: str) -> StrategyOptions:
        """Return the options with the strategy `name` and no other choices."""
        return replace(self, strategy=name, **vars(get_strategy(name)[0]))

    def own_choices(self) -> list[str]:
        """Return the keys of the choices that differ from those of the named strategy."""
        usual, now = preset(self.strategy), flat(self)
        return [key for key, value in usual.items() if now.get(key, usual) != value]


JOINTS = tuple(vars(Strategy()))
"""The fields of a strategy, which are fields of `StrategyOptions`."""


def preset(name: str) -> dict[str, Any]:
    """Return the options of a named strategy; none if there is no such strategy.

    For "auto", these are the options of COMM-OPT.
    """
    if (named := NAMED.get(COMM_OPT if name == AUTO else name)) is None:
        return {}
    return flat(named.strategy)


PRESETS = Presets("strategy", preset)


@dataclass(frozen=True)
class CoverageOptions:
    """Which layers K-FAC covers, and in what form.

    Args:
        norms: also precondition the scale and shift of normalisation layers.
        kfac_approx: how the positions at which an image uses a weight enter the factors. "expand":
            each position is an example; "reduce": the mean over the positions is an example.
        largest: the maximum order of a factor; larger factors are cut into equal blocks. null: the
            limit that the budget requires, if any.
        rank: the number of eigenvectors that are kept if a factor or block has a larger order; the
            remaining eigenvalues are replaced by their mean. null keeps all. A rank needs
            preconditioner=eigen.
        skip: the names of layers that are trained without K-FAC.
    """

    norms: bool = section("K-FAC: covered layers", field(default=False))
    kfac_approx: Literal["expand", "reduce"] = "expand"
    largest: int | None = bounded(None, ">= 1")
    rank: int | None = bounded(None, ">= 1")
    skip: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KfacOptions:
    """The settings of K-FAC.

    Args:
        factor_update_steps: the number of steps between two updates of the factors. null: 10, but
            fewer in the first 160 steps; 1 with shampoo, kl-shampoo and soap.
        inv_update_steps: the number of steps between two decompositions of the factors. null: the
            strategy's value, which is 50 for most strategies, but smaller in the first 160 steps.
        preconditioner: the preconditioner of gradients; K-FAC is one of several.
            A preconditioner has its own defaults for damping, grafting, momentum and
            factor_update_steps, which apply unless you set these options. "inverse": damped
            inverses; "eigen": eigenbases; "ekfac": eigenbases with eigenvalues from the gradients
            of single images; "eva": mean vectors in place of factors, as in Eva; "shampoo",
            "kl-shampoo": roots of factors of the averaged gradient; "soap": Adam in eigenbases of
            such factors; "muon": the gradient, without factors; "normuon": the same, with rows of
            about equal length; "newton-muon": inverses of only the input factors. null: the
            preconditioner of the strategy (inverse for most strategies).
        momentum_of: where `momentum` is applied. "gradients": Nesterov momentum of the averaged
            gradients, before K-FAC preconditions them; needs grafting by Adam. "directions":
            momentum of the directions, which the optimizer applies; use smaller learning rates.
            null: "gradients" with such grafting and no clip or nesterov, otherwise "directions".
        budget: the maximum average number of operations in statistics and decompositions, as a
            fraction of those in the forward and backward passes; the limit is 1 in the first 160
            steps. To meet it, intervals are lengthened, and factors are cut into blocks with at
            most 128 rows or, if that is more, half as many rows as a batch has vectors. With null,
            or if you set an interval, there is no limit.
        damping_adapt: the number of steps between two adaptations of the damping to how well the
            quadratic model predicts the loss; each adaptation costs a forward pass. null: the
            damping is not adapted.
        grafting: what determines the length of each layer's direction. With a clip, the default is
            none.
        clip: a bound on the directions of all layers together.
        matmul_precision: how the products that precondition gradients and orthogonalise directions
            round their operands, on tensor cores: "tf32" to 10 bits of mantissa, "bfloat16" to 7
            bits. null: tf32 on an NVIDIA GPU without staleness, otherwise float32.
        cuda_graph: record the computation of directions as a CUDA graph, and replay it with a
            single call.
    """

    factor_update_steps: int | Schedule | None = section("K-FAC", bounded(None, ">= 1"))
    inv_update_steps: int | Schedule | None = bounded(None, ">= 1")
    preconditioner: Preconditioner | None = None
    momentum_of: Literal["gradients", "directions"] | None = None
    budget: float | None = bounded(0.3, "> 0")
    damping_adapt: int | None = bounded(None, ">= 1")
    damping: Damping = section(
        "K-FAC: damping", inline(Damping, value="damping", relative="relative_damping")
    )
    grafting: Grafting = section(
        "K-FAC: grafting and clip",
        field(default_factory=AdamGrafting, metadata={"without": ("momentum",)}),  # see momentum_of
    )
    clip: Clip | None = None
    matmul_precision: Precision | None = None
    cuda_graph: bool = False
    estimator: Estimator = section("K-FAC: estimate of factors", inline(Estimator))
    coverage: CoverageOptions = inline(CoverageOptions)

    @property
    def lasting_factor_update_steps(self) -> int:
        """The value of `factor_update_steps` at epoch 0, or the default after 160 steps."""
        return (
            FACTOR_EVERY if self.factor_update_steps is None else at_start(self.factor_update_steps)
        )


USUAL_RATES = {
    **{"kfac": RATE, "adamw": 0.001, "muon": 0.003, "sgd": 0.1, "soap": 0.003},
    **{"lars": 10.0, "lamb": 0.03},
}
"""Default learning rates by optimizer.

K-FAC's rate assumes steps as long as Adam's, and momentum applied to gradients.
"""
FOR_DIRECTIONS = 0.4  # scales the default rate, as momentum applied to directions lengthens steps


@dataclass(frozen=True)
class LearningOptions:
    """What a run learns, with which optimizer, and for how many epochs.

    Args:
        optimizer: the optimizer. "kfac": SGD with gradients that kfac.preconditioner preconditions,
            by K-FAC, Shampoo, Muon or others; the other optimizers are baselines. "muon":
            Muon for weights of linear layers and convolutions, with filters as matrices, and AdamW
            for the first layer, the last layer and all other parameters; "soap": Adam in Shampoo's
            eigenbases; "lars" and "lamb": SGD and Adam with steps in proportion to the norm of the
            layer's weights. "muon", "soap", "lars" and "lamb" need the package pytorch_optimizer.
        model: the network: FILE.py:FUNCTION, timm:NAME for a network from timm, or a name.
            Autoencoders learn the pixels of their inputs; "gpt_small" and "lstm_small" learn the
            next byte of a text; all other networks are classifiers and learn labels.
        data: the data set.
        kfac: the settings of K-FAC.
        batch: the number of images per step, across all ranks; a multiple of the number of
            ranks. Schedules of other options follow the epochs, regardless of the batch. null:
            256, or the next lower multiple of the number of ranks, if batch_per_rank is null.
        batch_per_rank: the number of images per step on each rank. A run that resumes on another
            number of ranks keeps the total batch.
        accumulate: the number of passes in which a rank processes its part of a step's images, one
            after another, to save memory: a step uses the mean gradient of all passes. Layers that
            normalise a batch normalise each pass separately.
        autocast: the dtype of torch.autocast, to which operands of products in the network's passes
            are rounded; null for none. Weights, gradients and K-FAC stay in float32.
        epochs: the number of passes over the training images, and the length of the schedule.
        eval_every: the number of epochs from one evaluation on the test images to the next; a run
            always ends with an evaluation after its last epoch.
        eval_steps: the number of steps from one additional evaluation to the next, also within
            epochs; null for none. Ranks with different replicas average their weights beforehand.
        keep_best: save the weights with the best test result so far to RUN_DIR/best.pt.
        patience: the number of consecutive evaluations without improvement after which the run
            ends; null: the run completes all epochs.
        lr: the learning rate. null: 0.0075 for K-FAC with a kfac.grafting by Adam, or 0.003
            with kfac.momentum_of=directions; 0.003 for Muon and SOAP; 0.001 for AdamW; 0.03 for
            LAMB; 10 for LARS; and 0.1 for SGD and K-FAC with kfac.grafting=none or sgd.
            kfac.grafting=quadratic-model needs no rate.
        scale_lr: how the learning rate grows with the number of ranks at the first start. "linear":
            lr times this number; "sqrt": lr times its square root; false: not at all.
            If the rate grows, a warm-up starts at lr.
        warmup_epochs: the number of epochs at the start in which the learning rate rises linearly.
        schedule: how the learning rate changes. "constant": no change; "step": it decays by
            decay_factor at each of decay_epochs; "linear": it decays linearly to 0 at the end;
            "cosine": it decays to 0 at the end along half a cosine.
        decay_epochs: the epochs at which the learning rate decays, for schedule=step.
        decay_factor: the factor by which the learning rate decays, for schedule=step.
        momentum: the momentum of SGD, K-FAC, Muon and LARS, or beta1 of AdamW, SOAP and LAMB. With
            kfac.preconditioner=soap, muon, normuon or newton-muon, the default is 0.95.
        nesterov: use Nesterov momentum in SGD and K-FAC.
        weight_decay: the weight decay: an L2 penalty of SGD, K-FAC and LARS, or decoupled from the
            gradient in AdamW, Muon, SOAP and LAMB.
        label_smoothing: the fraction of an image's label that is distributed equally over all
            classes in the training loss; evaluations use the plain labels.
        ema_decay: the decay of an exponential average of the weights over steps, such as 0.99,
            which evaluations use; in the first steps, it is the plain mean. 0: evaluations use
            the weights themselves.
        distribution: the strategy.
        weights: a file of initial weights, .pt or .safetensors: a state_dict, or a file written by
            `mpikfac export`. Tensors of the last module can be missing or have another shape; these
            keep the seed's initial values. A run that resumes uses its checkpoint. null: all
            weights are initialised from the seed.
        frozen_epochs: the number of epochs at the start in which only the classifier, the last
            module with parameters, is trained; all other layers are frozen, and are trained from
            the second step of the next epoch on. null: all layers are trained from the start.
        direct_feedback: the names of modules, such as [layer1, layer2], each of which ends a block
            of layers. The gradients of a block are computed from the error of the outputs and
            fixed signs, not from the next block [Han & Yoo 2019]; inside blocks, they are exact.
            K-FAC needs kfac.fisher_type=forward-only. Empty: all gradients are exact.
        seed: the seed of initial weights, of the order of images and of augmentation.
    """

    optimizer: Literal["kfac", "sgd", "adamw", "muon", "soap", "lars", "lamb"] = "kfac"
    model: str = listed(MODELS, "digits_cnn")
    data: DataOptions = field(default_factory=DataOptions)
    kfac: KfacOptions = field(default_factory=KfacOptions)
    codistillation: GroupOptions = inline(GroupOptions)
    batch: int | Schedule | None = section("batch", bounded(None, ">= 1"))
    batch_per_rank: int | None = bounded(None, ">= 1")
    accumulate: int = bounded(1, ">= 1")
    autocast: Literal["bfloat16"] | None = None
    epochs: int = section(LENGTH, bounded(10, ">= 1"))
    eval_every: int = bounded(1, ">= 1")
    eval_steps: int | None = bounded(None, ">= 1")
    keep_best: bool = False
    patience: int | None = bounded(None, ">= 1")
    lr: float | None = section("learning rate, momentum, regularisation", bounded(None, "> 0"))
    scale_lr: Literal["linear", "sqrt", False] = False
    warmup_epochs: float = bounded(0.0, ">= 0")
    schedule: Literal["constant", "step", "linear", "cosine"] = "linear"
    decay_epochs: list[int] = field(default_factory=list, metadata={"bounds": (">= 1",)})
    decay_factor: float = bounded(0.1, "> 0", "<= 1")
    momentum: float = bounded(MOMENTUM, ">= 0", "< 1")
    nesterov: bool = False
    weight_decay: float = bounded(WEIGHT_DECAY, ">= 0")
    label_smoothing: float = bounded(0.0, ">= 0", "< 1")
    ema_decay: float = bounded(0.0, ">= 0", "< 1")
    distribution: StrategyOptions = inline(StrategyOptions)
    weights: str | None = section("initial weights, seed", field(default=None))
    frozen_epochs: int | None = bounded(None, ">= 1")
    direct_feedback: list[str] = field(default_factory=list)
    seed: int = bounded(0, ">= 0", "< 4294967296")

    @property
    def virtual_ranks(self) -> int | None:
        """The number of virtual ranks over which a batch is divided; None: each rank has one."""
        return self.distribution.transport.virtual_ranks

    @property
    def rate(self) -> float:
        """The learning rate before any warm-up and decay."""
        if self.lr is not None:
            return self.lr
        if self.quadratic:
            return 1.0
        if self.optimizer == "kfac" and not self.kfac.grafting.by_adam:
            return USUAL_RATES["sgd"]
        of_directions = self.optimizer == "kfac" and not self.momentum_of_gradients
        return USUAL_RATES[self.optimizer] * (FOR_DIRECTIONS if of_directions else 1)

    @property
    def momentum_of_gradients(self) -> bool:
        """Whether the momentum is applied before K-FAC preconditions gradients."""
        if self.optimizer != "kfac" or self.kfac.momentum_of == "directions":
            return False
        usual = self.kfac.grafting.by_adam and self.kfac.clip is None and not self.nesterov
        return usual or self.kfac.momentum_of == "gradients"

    @property
    def momentum_of(self) -> str:
        """What K-FAC's momentum applies to: "gradients" or "directions"."""
        return "gradients" if self.momentum_of_gradients else "directions"

    @property
    def quadratic(self) -> bool:
        """Whether a quadratic model sets the step length and the momentum."""
        return self.optimizer == "kfac" and self.kfac.grafting.needs_batch

    @property
    def batches(self) -> int | ByEpoch:
        """The number of images per step, across all ranks, or a schedule by epoch."""
        assert isinstance(self.batch, int | ByEpoch), "`parse` fills in the batch"
        return self.batch

    @property
    def step_batch(self) -> int:
        """The number of images per step in epoch 0, across all ranks."""
        return int(at_start(self.batches))


@dataclass(frozen=True)
class Options(RunOptions, LearningOptions):
    """Train a network with K-FAC or a baseline; start ranks with `mpikfac launch`, mpirun or srun.

    Args:
        shrink: if a rank dies, the remaining ranks continue (under mpirun --with-ft ulfm).
        trace_steps: the number of steps whose stages are recorded on every rank, beginning with the
            third step after a start. The results are a table in the log, RUN_DIR/trace.json.gz for
            a browser, and RUN_DIR/stages.json. null for none.
    """

    shrink: bool = section(END, field(default=False))
    trace_steps: int | None = section(LOG, bounded(None, ">= 1"))


BASIC = (
    *("optimizer", "model", "data.name", "data.path", "data.augment", "batch", "batch_per_rank"),
    *("epochs", "max_steps", "lr", "warmup_epochs", "schedule", "momentum", "weight_decay", "seed"),
    *("run_dir", "resume", "checkpoint_minutes", "max_time", "log_every", "trace_steps", "device"),
    *(
        "strategy",
        "assignment.type",
        "sync.type",
        "kfac.damping",
        "kfac.factor_update_steps",
        "kfac.inv_update_steps",
    ),
    *("kfac.relative_damping", "kfac.preconditioner.type", "kfac.grafting.type"),
    "kfac.momentum_of",
)
"""The options that newcomers need, which `--help` shows."""


def usual_values(group: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a preconditioner by key, for options that a user does not set.

    Args:
        group: a dataclass with a field `kfac` of `KfacOptions`.
        given: the values by key that a user sets; the names of types are checked.
    """
    keys = {leaf.path: leaf.key for leaf in leaves(group)}
    prefix = keys["kfac", "damping", "value"].removesuffix("damping")
    strategy = NAMED.get(str(given.get("strategy")))
    of_strategy = strategy.settings.get("preconditioner") if strategy else None
    key = f"preconditioner.{TYPE}"
    named = given.get(f"{prefix}{key}", given.get(key, of_strategy))
    if given.get("optimizer", "kfac") != "kfac":
        return {}
    usual, momentum = _defaults(named) if isinstance(named, str) else ({}, 0.0)
    if f"{prefix}clip.{TYPE}" in given:
        usual = {key: v for key, v in usual.items() if not key.startswith("grafting.")}
        usual |= {f"grafting.{TYPE}": NoGrafting.name}
    if {f"{prefix}{key}" for key in DAMPING} & given.keys():  # two keys for the same value
        usual = {key: value for key, value in usual.items() if key not in DAMPING}
    values = {f"{prefix}{key}": value for key, value in usual.items()}
    return values | ({"momentum": momentum} if momentum and ("momentum",) in keys else {})


DAMPING = ("damping", "relative_damping")


def _defaults(preconditioner: str) -> tuple[dict[str, Any], Any]:
    """Return the K-FAC options that a preconditioner changes, by key, and its momentum."""
    defaults = joints.type_of("preconditioner", Preconditioner, preconditioner).defaults
    now, usual = flat(KfacOptions(**vars(defaults))), flat(KfacOptions())
    changed = {key: v for key, v in now.items() if v is not None and v != usual.get(key)}
    return changed, defaults.grafting.momentum


TRAIN = CommandLine(
    "mpikfac train", Options, BASIC, files=True, usual=usual_values, presets=PRESETS
)
