"""Keep the settings of a run across restarts: a checkpoint stores the options of its run.

A resumed run uses the options of the checkpoint, except for those set on the command line or in a
file that it names. Options that differ between the two starts are logged, or raise an error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac.plan import named_types
from mpikfac.preconditioners import Preconditioner
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.options.by_epoch import ByEpoch, numbers_of
from mpikfac_apps.options.documents import flattened, loaded
from mpikfac_apps.options.fields import TYPE, flat, possible
from mpikfac_apps.options.options import TRAIN, Options
from mpikfac_apps.options.parse import parse, resolved
from mpikfac_apps.running.checkpoints import root
from mpikfac_apps.text import is_own

OF_A_START = (
    *("run_dir", "resume", "max_steps", "max_time", "shrink", "trace_steps", "device", "threads"),
)
"""Options that apply to a single start only; later starts do not keep their values."""
OF_CODE = ("model", "data.name", "metrics")
"""Options whose values can name a file to execute."""

CHOOSES = ("optimizer", "strategy")
"""Options that choose an algorithm, in addition to those whose keys end in ".type"."""

PRECONDITIONER = "kfac.preconditioner.type"

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class RunSettings:
    """The options of a run by key, as in a YAML file.

    Attributes:
        given: the options as given by the user; null for choices that are left to the program.
        resolved: the options after the program has made all choices; see `parse.resolved`.
    """

    given: Mapping[str, Any]
    resolved: Mapping[str, Any]


def of_start(argv: Sequence[str] | None, ranks: int) -> Options:
    """Return the checked options; a resumed run keeps the saved value of an option that is not set.

    If the first start left a choice to the program, the choice saved in the checkpoint is kept
    unless it depends on an option that changes. If the preconditioner changes, options that have
    the default values of the previous preconditioner are not kept.

    Raises:
        ValueError: an option is invalid; the one-line message states key, value and allowed values.
        SystemExit: with code 0, after --help, --help_all or --print_config.
    """
    named = TRAIN.read(argv)
    path = _checkpoint(named)
    before = of_checkpoint(path) if path else None
    if before is None:
        return parse(argv, ranks)
    left = ["batch"] if named.batch_per_rank else []  # see `follow`
    try:
        read = TRAIN.read(argv, kept_of(before.given, left))
        _check_code(flat(read), flat(named))  # first, because checking options executes files
        left += _usual_before(before, read, ranks)
        kept = kept_of(before.given, left)
        options = parse(argv, ranks, kept)
        _check_groups(before, options)
        pinned = _pinned(before, kept, options, ranks)
        return parse(argv, ranks, kept | pinned) if pinned else options
    except ValueError as error:
        raise ValueError(f"{error}; change the options that come from {path}") from error


def _checkpoint(options: Options) -> Path | None:
    """Return the newest checkpoint to resume from; training checks its content later."""
    if options.resume == "auto":
        roots = root(options), Path(options.run_dir) / "group-0" / "checkpoints"
        return next(filter(None, map(mpikfac.checkpoint.latest_checkpoint, roots)), None)
    path = Path(options.resume)
    path = path / "group-0" if (path / "group-0").is_dir() else path
    return checkpoint_at(path) if options.resume != "never" and path.is_dir() else None


def kept_of(options: Mapping[str, Any], left: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a run that a resumed run keeps, except those in `left`."""
    known = possible(Options)
    of_types = tuple(f"{leaf.name}." for leaf in known.values() if leaf.joint)
    gone = {*OF_A_START, *left}
    return {
        key: value
        for key, value in options.items()
        if key not in gone and (key in known or key.startswith(of_types))
    }


def _usual_before(before: RunSettings, options: Options, ranks: int) -> list[str]:
    """Return the keys of options with the default values of the previous preconditioner.

    The result is empty if the preconditioner does not change.
    """
    preconditioner = before.resolved.get(PRECONDITIONER)
    if (
        preconditioner not in named_types(Preconditioner)
        or preconditioner == flattened(resolved(options, ranks))[PRECONDITIONER]
    ):
        return []
    usual = flat(TRAIN.read([f"--kfac.preconditioner={preconditioner}"]))
    keys = (key for key in usual if key == "momentum" or key.startswith("kfac."))
    return [key for key in keys if before.given.get(key) == usual[key]]


def _pinned(
    before: RunSettings, kept: Mapping[str, Any], options: Options, ranks: int
) -> dict[str, Any]:
    """Return the saved values of choices that this version of the program would make differently.

    To avoid executing files that the checkpoint names, options that can name files of code are
    taken from this start.
    """
    given = flat(options)
    code = {key: given[key] for key in OF_CODE}
    try:
        usual = flattened(resolved(parse([], ranks, {**kept, **code}), ranks))
    except ValueError:  # saved values that this start replaces may be invalid by themselves
        return {}
    now = flattened(resolved(options, ranks))
    # If a type has changed, some of these options existed only before, or exist only now.
    keys = before.resolved.keys() & kept.keys() & given.keys() & now.keys() & usual.keys()
    keys -= {*OF_CODE}
    return {
        key: value
        for key, value in before.resolved.items()
        if key in keys and given[key] == kept[key] and now[key] == usual[key] != value
    }


def _check_groups(before: RunSettings, options: Options) -> None:
    """Check that the number of groups is unchanged: groups resume with each other's weights."""
    groups, saved = options.codistillation.groups, before.given.get("groups", 1)
    if groups != saved:
        raise ValueError(f"groups={groups} must be {saved}, as in the run that is continued")


def _check_code(options: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Raise an error if an option names a file to execute that only the checkpoint names."""
    for key, value, file in code_of(options):
        if named[key] != value:
            raise ValueError(
                f"{key}={in_yaml(value)} would run {file}; if you trust the file, pass "
                f"--{key}={in_yaml(value)}"
            )


def code_of(options: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the key, value and file of each option that names a file to execute."""
    for key in OF_CODE:
        value = options[key]
        for name in value if isinstance(value, list) else [value]:
            if is_own(name):
                yield key, value, name.rpartition(":")[0]


def of_checkpoint(path: Path) -> RunSettings | None:
    """Return the settings of the run of a checkpoint or, if it is damaged, from its config.yaml.

    Returns:
        None if neither the checkpoint nor a config.yaml can be read.
    """
    try:
        saved = saved_run(mpikfac.checkpoint.read_checkpoint(path))
    except (mpikfac.UserError, ValueError):  # training will report this, or use an older checkpoint
        saved = {}
    return of_saved(saved, path)


def of_saved(saved: Mapping[str, Any], path: Path) -> RunSettings | None:
    """Return the settings of a run from its checkpoint or, failing that, from its config.yaml."""
    if "settings" in saved:
        of_run = dict(saved["settings"])
        return RunSettings(_given(of_run, saved["open"]), of_run)
    folder = path.resolve().parent
    try:
        document = loaded(files.read_text(folder.parent / "config.yaml"))
    except (OSError, ValueError):
        return None
    if folder.name != "checkpoints" or not isinstance(document, dict):
        return None
    of_run = flattened(document)
    return RunSettings(of_run, of_run)


def _given(of_run: Mapping[str, Any], left_open: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as given by the user; null for those left to the program.

    Options of the types that the program has chosen are omitted.
    """
    of_types = tuple(key.removesuffix(TYPE) for key in left_open if key.endswith(f".{TYPE}"))
    chosen = {key: value for key, value in of_run.items() if not key.startswith(of_types)}
    return {**chosen, **left_open}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the options that differ between two starts, as "lr 0.1 -> 0.05, ...".

    Options that choose an algorithm come first. Options that exist in only one of the two starts
    are counted, but not listed.
    """
    keys = [key for key in {**now, **before} if key not in OF_A_START]
    differing = [k for k in keys if k in before and k in now and before[k] != now[k]]
    differing.sort(key=lambda key: not (key in CHOOSES or key.endswith(f".{TYPE}")))
    words = [f"{key} {in_yaml(before[key])} -> {in_yaml(now[key])}" for key in differing]
    for which, one, other in (("gone", before, now), ("new", now, before)):
        if count := sum(key in one and key not in other for key in keys):
            words.append(f"{count} option{'s' * (count > 1)} {which}")
    return ", ".join(words)


# -- what a checkpoint contains about its run ------------------------------------------------------


def about_run(options: Options, ranks: int) -> dict[str, Any]:
    """Return the description of a run's options that its checkpoints contain.

    Args:
        ranks: the number of ranks that train.
    """
    choices, given = flattened(resolved(options, ranks)), flat(options)
    of_run = {key: value for key, value in choices.items() if key not in OF_A_START}
    left_open = {key: None for key in of_run if key in given and given[key] != of_run[key]}
    return identity(options) | {"settings": of_run, "open": left_open}


def identity(options: Options) -> dict[str, Any]:
    """Return the options that determine the meaning of steps and weights; a restart keeps them."""
    chosen = dataclasses.asdict(options.data)
    for free in ("path", "test_images", "workers", "max_broken_images", "cache"):
        del chosen[free]
    return {
        "model": options.model,
        **{f"data.{key}": value for key, value in chosen.items()},
        "batch": in_words(options.batches),
        "transport.virtual_ranks": options.virtual_ranks,
        "frozen_epochs": options.frozen_epochs,
        "seed": options.seed,
    }


def saved_run(checkpoint: mpikfac.checkpoint.Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's description of its run.

    Raises:
        ValueError: the description is not in the expected format.
    """
    saved = files.json_of(str(checkpoint["run/data"]))
    if not files.has_form(saved, {"ranks": int, "threads": int, "batch": (int, str)}):
        raise ValueError("item 'run/data' has an unexpected form")
    if "settings" in saved and not files.has_form(saved, {"settings": dict, "open": dict}):
        raise ValueError("item 'run/data' has settings of an unexpected form")
    ranks, batch = saved["ranks"], saved["batch"]
    if ranks < 1 or (isinstance(batch, int) and ranks > batch):
        raise ValueError(f"item 'run/data' has {ranks} ranks for batch={batch}")
    return saved


def check_images(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Check that a resumed run has the same training images; log whether test images differ.

    Args:
        before: the checksums in the checkpoint; see `Dataset.checksums`.
        now: the checksums of the images of this start.

    Raises:
        ValueError: the checksums of training images differ.
    """
    for key in sorted(before):
        if before[key] == now[key]:
            continue
        if key == "tests":
            log.info("the test images differ from those of the checkpoint")
            continue
        raise ValueError(
            f"the checkpoint belongs to different training images (checksum {before[key]} of "
            f"{key}, now {now[key]}); use the same images, or start a new run"
        )


def follow(options: Options, saved: Mapping[str, Any], ranks: int) -> Options:
    """Return the options, with the saved batch size if they set `batch_per_rank`.

    Raises:
        ValueError: an option that a restart must keep differs, or the batch is not a multiple of
            the number of ranks.
    """
    requested_batch = options.batches
    if options.batch_per_rank and isinstance(saved["batch"], int):
        options = dataclasses.replace(options, batch=saved["batch"])
    for key, value in identity(options).items():
        if (before := saved.get(key)) != value:
            raise ValueError(
                f"it was saved with {key}={in_yaml(before)}; this run has {in_yaml(value)}; pass "
                f"--{key}={in_yaml(before)}"
            )
    batch, began_on = options.batches, saved["ranks"]
    common = math.gcd(*numbers_of(batch))
    if common % ranks and not options.shrink:
        raise ValueError(
            f"it was saved with batch={batch}, which is not a multiple of {ranks} ranks; use one "
            f"of {mpikfac.plan.divisors(common)} ranks"
        )
    if requested_batch != batch or (options.scale_lr and began_on != ranks):
        scaled = f", lr scaled for {began_on}" if options.scale_lr else ""
        log.info(
            "the run was first started with ranks=%d; it keeps batch=%s%s", began_on, batch, scaled
        )
    return options


def in_words(batch: int | ByEpoch) -> int | str:
    """Return a batch size as checkpoints store it: an int, or, if it varies by epoch, a string."""
    return str(batch) if isinstance(batch, ByEpoch) else batch


def in_yaml(value: object) -> str:
    """Return a value as written on the command line."""
    return shlex.quote(value) if isinstance(value, str) else json.dumps(value)
