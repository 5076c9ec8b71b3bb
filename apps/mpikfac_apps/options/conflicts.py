"""Check options for values that are valid alone but not together."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import mpikfac
from mpikfac_apps.options.by_epoch import ByEpoch, numbers_of
from mpikfac_apps.options.options import AUTO, DataOptions, Options
from mpikfac_apps.options.strategy import dealt_out, make_strategy
from mpikfac_apps.problems.datasets import DATASETS, source
from mpikfac_apps.problems.models import MODELS, network
from mpikfac_apps.problems.tasks import CLASSIFICATION
from mpikfac_apps.text import number
from mpikfac_apps.tracking.tracker import check as check_trackers

PACKAGED = ("muon", "soap", "lars", "lamb")  # optimizers of the package pytorch_optimizer
USUAL_BATCH = 256  # images per step, across all ranks


def check_conflicts(options: Options, ranks: int) -> None:
    """Check for option values that cannot be combined, in a job in which `ranks` ranks train.

    Raises:
        ValueError: two values cannot be combined; the message states the options and a remedy.
    """
    check_data(options.data)
    _check_images(options)
    _check_schedule(options)
    _check_momentum(options)
    _check_quadratic(options)
    _check_passes(options)
    adapt, damping = options.kfac.damping_adapt, options.kfac.damping.number
    if adapt and isinstance(damping, ByEpoch):
        raise ValueError(f"kfac.damping_adapt={adapt} needs a single damping, not {damping}")
    _check_strategy(options, ranks)
    _check_split(options, ranks)
    _check_frozen(options, ranks)
    _check_groups(options, ranks)
    if options.resume not in ("never", "auto") and not Path(options.resume).is_dir():
        raise ValueError(
            f"resume={options.resume} must be never, auto, or the directory of a checkpoint or run"
        )
    if options.optimizer in PACKAGED and not importlib.util.find_spec("pytorch_optimizer"):
        raise ValueError(
            f"optimizer={options.optimizer} needs the package pytorch_optimizer, which is not "
            f"installed; run pip install pytorch_optimizer"
        )
    check_trackers(options.trackers)


def _check_strategy(options: Options, ranks: int) -> None:
    """Check that the strategy is compatible with the number of ranks and the other options."""
    strategy, _ = make_strategy(options.distribution, options.kfac, ranks)
    if options.optimizer != "kfac" and options.distribution.strategy == "auto":
        raise ValueError(f"strategy=auto needs optimizer=kfac, not {options.optimizer}")
    if options.accumulate > 1 and strategy.transport.overlap:
        raise ValueError(
            f"accumulate={options.accumulate} needs transport.overlap=false: overlapped messages "
            f"need a single backward pass per step"
        )
    sync = strategy.sync
    if not sync.waits_for_all and options.optimizer == "kfac":
        raise ValueError(f"sync={sync.name} needs an optimizer other than kfac, such as sgd")
    if sync.waits_for_all and not sync.local_steps:
        return
    choices = {name: getattr(options, name) for name in ("ema_decay", "shrink", "frozen_epochs")}
    for name, value in {**choices, "split_layers": options.distribution.split}.items():
        if value:
            raise ValueError(
                f"{name}={str(value).lower()} needs sync=synchronous, not {sync.name}: ranks have "
                f"different replicas of the model"
            )


def _check_split(options: Options, ranks: int) -> None:
    """Check the names of split layers, and that no other option rules out splitting."""
    split, tp_size = options.distribution.split, options.distribution.tp_size
    if tp_size and split in ([], [AUTO]):
        raise ValueError(f"tp_size={tp_size} needs names of layers in split_layers, not {split}")
    if split and options.shrink:
        raise ValueError(
            f"shrink=true needs split_layers=[], not {split}: fewer ranks cannot form the groups"
        )
    if split and split != [AUTO]:
        mpikfac.TensorParallelPlan(tp_size or ranks, dealt_out(split)).check_ranks(ranks)


def _check_frozen(options: Options, ranks: int) -> None:
    """If `frozen_epochs` is set, check for options that need the same trained layers throughout."""
    frozen, choices = options.frozen_epochs, options.distribution
    if frozen is None:
        return
    if frozen >= options.epochs:
        raise ValueError(f"frozen_epochs={frozen} must be less than epochs={options.epochs}")
    strategy, _ = make_strategy(choices, options.kfac, ranks)
    spared, model = strategy.refresh.servers, options.model
    for wrong, need, why in (
        (
            model == "airbench94",
            f"a model other than {model}",
            "the model itself freezes layers",
        ),
        (
            spared,
            f"refresh=owners, not {strategy.refresh.name}",
            "curvature servers handle only the layers that are trained from the start",
        ),
        (choices.split, f"split_layers=[], not {choices.split}", "layers are split at the start"),
        (
            choices.strategy == AUTO,
            "a named strategy, not auto",
            "the strategy that auto selects depends on which layers are trained",
        ),
    ):
        if wrong:
            raise ValueError(f"frozen_epochs={frozen} needs {need}: {why}")


def _check_groups(options: Options, ranks: int) -> None:
    """Check for options that cannot be combined with several groups of ranks."""
    groups, task = options.codistillation.groups, network(options.model).task
    if groups == 1:
        return
    strategy, _ = make_strategy(options.distribution, options.kfac, ranks)
    sync, adapt = strategy.sync, options.kfac.damping_adapt
    for wrong, need, why in (
        (options.shrink, "shrink=false, not true", "the remaining ranks cannot form equal groups"),
        (
            options.patience,
            f"patience=null, not {options.patience}",
            "all groups must end at the same time",
        ),
        (
            sync.local_steps or not sync.waits_for_all,
            f"sync=synchronous, not {sync.name}",
            "all ranks of a group must have the same model",
        ),
        (
            options.quadratic,
            "a kfac.grafting other than quadratic-model",
            "the quadratic model does not include the peers",
        ),
        (
            adapt,
            f"kfac.damping_adapt=null, not {adapt}",
            "the loss after a step does not include the peers",
        ),
        (
            task.loss_name != "cross-entropy",
            f"a classifier, not model={options.model}",
            "a group learns from its peers' class probabilities",
        ),
    ):
        if wrong:
            raise ValueError(f"groups={groups} needs {need}: {why}")


def check_data(data: DataOptions) -> None:
    """Check that the data options can be combined."""
    entry = source(data.name)
    if entry.needs and getattr(data, entry.needs[0]) is None:
        key, meaning = entry.needs
        raise ValueError(f"data.name={data.name} needs data.{key}, {meaning}")
    for key in ("path", "size", "classes", "workers", "max_broken_images", "cache"):
        value, takers = getattr(data, key), [n for n, s in DATASETS.items() if key in s.takes]
        if value is not None and data.name not in takers:
            names = " or ".join(takers)
            raise ValueError(f"data.{key}={value} needs data.name={names}, not {data.name}")
    for key in ("shift", "mirror"):
        if (value := getattr(data, key)) is not None and not data.augment:
            raise ValueError(f"data.{key}={value} needs data.augment=true, not false")
        if value is not None and entry.files:
            raise ValueError(
                f"data.{key}={value} needs images in memory, not data.name={data.name}"
            )
    if data.augment and not {"labels", "pixels"} & {*entry.holds}:
        raise ValueError(f"data.augment=true needs images, not data.name={data.name}")
    if entry.files:
        check_pillow(f"data.name={data.name}")


def check_pillow(what: str) -> None:
    """Check that the package that decodes images is installed.

    Raises:
        ValueError: the package is missing; the message is one line with the remedy.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(
            f"{what} needs the package pillow, which is not installed; run pip install pillow"
        )


def _check_images(options: Options) -> None:
    """Check that the network can use the data, and that they contain what the network learns."""
    model, size = network(options.model), pixels(options.data)
    learns, holds = model.task.learns, source(options.data.name).holds
    if learns not in holds:
        suggestion = next(name for name, entry in MODELS.items() if entry.task.learns in holds)
        raise ValueError(
            f"model={options.model} learns {learns}, which data.name={options.data.name} lacks; "
            f"try model={suggestion}"
        )
    choices = {"label_smoothing": options.label_smoothing, **mixes(options)}
    for name, value in choices.items():
        if model.task is not CLASSIFICATION and value:
            raise ValueError(f"{name}={value} needs a classifier, not model={options.model}")
    if size:
        check_size(options, (size, size))


def mixes(options: Options) -> dict[str, float]:
    """Return the options that mix images in pairs, with their values."""
    alphas = {f"data.{name}": getattr(options.data, name) for name in ("mixup", "cutmix")}
    return {name: value for name, value in alphas.items() if value is not None}


def check_pairs(options: Options, ranks: int) -> None:
    """Check that each rank has an even number of images if images are mixed in pairs.

    Raises:
        ValueError: a rank has an odd number of images; the message is one line that names the
            options.
    """
    for name, value in mixes(options).items():
        for batch in numbers_of(options.batches):
            if batch // ranks % 2:
                raise ValueError(
                    f"{name}={value} needs an even number of images per rank, not "
                    f"{batch // ranks}: batch={batch} on {number(ranks, 'rank')}"
                )


def check_size(options: Options, size: tuple[int, ...]) -> None:
    """Check that images have the height and width that the network needs.

    Raises:
        ValueError: the network needs images of a different size.
    """
    model = network(options.model)
    if model.fixed and model.image and model.image[1:] != size:
        height, width = model.image[1:]
        raise ValueError(
            f"model={options.model} accepts only images of {height}x{width} pixels, but "
            f"data.name={options.data.name} has {size[0]}x{size[1]}"
        )


def pixels(data: DataOptions) -> int | None:
    """Return the side length in pixels or the tokens per window; None if the data determine it."""
    return data.size or source(data.name).size


def doubt(options: Options) -> str:
    """Return a warning if the network would reduce the images to almost nothing, or ""."""
    image, size = network(options.model).image, pixels(options.data)
    if image is None or size is None or size * 2 > min(image[1:], default=0):
        return ""
    usual, given = ("x".join(map(str, sides)) for sides in (image[1:], [size] * (len(image) - 1)))
    return (
        f"model={options.model} is made for images of {usual} pixels, but those of "
        f"data.name={options.data.name} have {given}: expect low accuracy, or use another model"
    )


def check_parts(options: Options, ranks: int) -> None:
    """Check that virtual ranks share the batch evenly, and passes share each rank's images evenly.

    Raises:
        ValueError: the number of virtual ranks does not divide the batch, or the number of passes
            does not divide the images of a rank; the message is one line that names both options.
    """
    virtual, batches = options.virtual_ranks, numbers_of(options.batch)
    for batch in filter(None, batches):
        if virtual and batch % virtual:
            raise ValueError(f"transport.virtual_ranks={virtual} must divide batch={batch}")
        if batch // ranks % options.accumulate:
            raise ValueError(
                f"accumulate={options.accumulate} must divide the {batch // ranks} images per rank "
                f"of batch={batch}"
            )


def _check_schedule(options: Options) -> None:
    epochs = options.decay_epochs
    if (options.schedule == "step") != bool(epochs):
        raise ValueError(
            f"decay_epochs={epochs} does not match schedule={options.schedule}: schedule=step "
            "needs at least one epoch, and all other schedules need []"
        )
    if options.schedule != "step" and options.decay_factor != Options.decay_factor:
        raise ValueError(
            f"decay_factor={options.decay_factor} needs schedule=step, not {options.schedule}"
        )
    if any(later <= earlier for earlier, later in zip(epochs, epochs[1:])):
        raise ValueError(f"decay_epochs={epochs} must increase")
    if options.warmup_epochs >= options.epochs:
        raise ValueError(
            f"warmup_epochs={options.warmup_epochs} must be less than epochs={options.epochs}"
        )


def _check_momentum(options: Options) -> None:
    if options.nesterov and not (options.optimizer in ("sgd", "kfac") and options.momentum):
        raise ValueError(
            f"nesterov=true needs optimizer=sgd or optimizer=kfac, and momentum > 0; got "
            f"optimizer={options.optimizer} and momentum={options.momentum}"
        )
    grafting, clip = options.kfac.grafting, options.kfac.clip
    if options.momentum_of_gradients and (clip is not None or not grafting.by_adam):
        setting = f"kfac.grafting={grafting.name}" if clip is None else f"kfac.clip={clip.name}"
        raise ValueError(
            f"kfac.momentum_of=gradients needs kfac.grafting=adam and no clip; leave out {setting} "
            f"or kfac.momentum_of"
        )
    if options.nesterov and options.momentum_of_gradients:
        raise ValueError(
            "nesterov=true needs kfac.momentum_of=directions, not gradients: gradient momentum is "
            "always Nesterov momentum"
        )


def check_momenta(options: Options, strategy: mpikfac.Strategy) -> None:
    """Check, as `KFAC` does, that momentum is not applied to gradients twice.

    Raises:
        ValueError: both K-FAC and the strategy's compressor would apply momentum to gradients; the
            message is one line that names both options.
    """
    compressor, momentum = strategy.compression.gradients, options.momentum
    own = getattr(compressor, "momentum", 0.0)
    if own and momentum and options.momentum_of_gradients:
        raise ValueError(
            f"compression.gradients.momentum={own} needs momentum=0, not {momentum}: otherwise, "
            f"momentum would be applied to gradients twice"
        )


def _check_quadratic(options: Options) -> None:
    """Check for options that would change a step whose length a quadratic model determines."""
    needed = {"lr": (None, 1.0), "scale_lr": (False,), "schedule": ("constant",)}
    needed |= dict.fromkeys(("warmup_epochs", "momentum", "weight_decay"), (0.0,))
    values = {name: getattr(options, name) for name in needed}
    wrong = [f"{name}={value}" for name, value in values.items() if value not in needed[name]]
    if options.quadratic and wrong:
        raise ValueError(
            f"kfac.grafting=quadratic-model sets the length and momentum of a step; it needs lr=1, "
            f"schedule=constant, momentum=0 and weight_decay=0; got {', '.join(wrong)}"
        )


def _check_passes(options: Options) -> None:
    """Check for options that cannot be combined with several passes per step, or with autocast."""
    if options.accumulate > 1 and options.virtual_ranks:
        raise ValueError(
            f"accumulate={options.accumulate} needs transport.virtual_ranks=null, not "
            f"{options.virtual_ranks}: each virtual rank has its own pass"
        )
    for name, usual in (("accumulate", 1), ("autocast", None)):
        if (value := getattr(options, name)) != usual and options.quadratic:
            raise ValueError(f"{name}={value} needs a kfac.grafting other than quadratic-model")


def global_batch(options: Options, ranks: int) -> int | ByEpoch:
    """Return the number of images per step, across all ranks, or a schedule by epoch.

    If the options set no batch, this is `USUAL_BATCH`, or the next smaller multiple of the number
    of virtual ranks or, without them, of ranks; but at least one image for each.

    Raises:
        ValueError: both batch options are set, or the number of ranks does not divide the batch.
    """
    batch, per_rank = options.batch, options.batch_per_rank
    if batch and per_rank:
        raise ValueError(
            f"batch={batch} and batch_per_rank={per_rank}: set one of them, and the other to null"
        )
    if not batch and not per_rank:
        share = options.virtual_ranks or ranks
        return max(share, USUAL_BATCH // share * share)
    options = dataclasses.replace(options, batch=batch or ranks * (per_rank or 0))
    for total in numbers_of(options.batches):
        if total % ranks:
            lower = total // ranks * ranks
            raise ValueError(
                f"batch={total} must be a multiple of the number of ranks ({ranks}); "
                f"try {lower or ranks} or {lower + ranks}"
            )
    return options.batches
