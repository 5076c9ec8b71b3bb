from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

import mpikfac
from mpikfac_apps.inspecting.options import INSPECT
from mpikfac_apps.launching.programs import PROGRAMS
from mpikfac_apps.options import by_epoch, options
from mpikfac_apps.options.conflicts import doubt
from mpikfac_apps.options.documents import SYNONYMS, flattened
from mpikfac_apps.options.fields import flat, leaves, possible
from mpikfac_apps.options.options import BASIC, TRAIN, Options
from mpikfac_apps.options.parse import parse, resolved
from mpikfac_apps.options.strategy import (
    for_machine,
    kfac_settings,
    learning_rate,
    make_strategy,
    preconditioner_of,
    training_ranks,
)
from mpikfac_apps.problems import models
from mpikfac_apps.problems.datasets import DATASETS
from mpikfac_apps.problems.models import MODELS
from mpikfac_apps.training.parts.optimizers import make_optimizer

RANKS = 6
CONFIGS = sorted((Path(__file__).parents[2] / "jobs" / "configs").glob("*.yaml"))

# Command line (batch=12 unless given; text ending in a newline is the content of a YAML file), then
# the content of the error's line.
BAD = {
    "unknown key": ("--bogus=1", "unknown key bogus; --help_all lists all keys"),
    "unknown key of a group": ("--kfac.bogus=1", "unknown key kfac.bogus; known keys are kfac."),
    "misspelt key": ("--kfac.dampng=1", "unknown key kfac.dampng; did you mean kfac.damping?"),
    "misspelt usual name": ("--lerning_rate=1", "unknown key lerning_rate; did you mean lr?"),
    "misspelt key of two groups": ("--wrokers=1", "did you mean data.workers?"),
    "abbreviated key": ("--kfac.damp=1", "unknown key kfac.damp; did you mean kfac.damping?"),
    "no option": ("train", "'train' is not the value of an option; write --key value"),
    "no value": ("--epochs", "epochs has no value; it must be a whole number >= 1"),
    "text for a number": ("--lr=fast", "lr=fast must be a finite number > 0"),
    "fraction for a count": ("--epochs=1.5", "epochs=1.5 must be a whole number >= 1"),
    "not a bool": (
        "--assignment.colocate_factors=maybe",
        "colocate_factors=maybe must be true or false",
    ),
    "not a list": ("--kfac.skip=fc", "kfac.skip=fc must be a list of names"),
    "wrong element": ("--decay_epochs=[1,x]", "decay_epochs=x must be a list of whole numbers"),
    "not a choice": (
        "--optimizer=adam",
        "optimizer=adam must be one of kfac, sgd, adamw, muon, soap, lars, lamb",
    ),
    "a rate scaled without a rule": (
        "scale_lr: true\n",
        "scale_lr=True must be one of linear, sqrt, false",
    ),
    "unknown rule": ("--scale_lr=cube", "scale_lr=cube must be one of linear, sqrt, false"),
    "nan": ("--lr=.nan", "lr=nan must be a finite number > 0"),
    "infinity": ("--weight_decay=.inf", "weight_decay=inf must be a finite number >= 0"),
    "negative": ("--kfac.damping=-1", "kfac.damping=-1.0 must be a finite number >= 0"),
    "zero": ("--epochs=0", "epochs=0 must be a whole number >= 1"),
    "decay of 1": ("--kfac.factor_decay=1", "kfac.factor_decay=1.0 must be at least 0 and below 1"),
    "epochs that fall": (
        "kfac.damping: 0.1 until 9, 0.2 until 3, 0.3\n",
        "kfac.damping=0.1 until 9, 0.2 until 3, 0.3 must be a finite number or null or a schedule",
    ),
    "a schedule that is adapted": (
        "kfac: {damping_adapt: 5, grafting: none, damping: '0.1 until 9, 0.2'}\n",
        "kfac.damping_adapt=5 needs a single damping, not 0.1 until 9, 0.2",
    ),
    "a zero in a schedule": (
        "kfac.factor_update_steps: 1 until 3, 0\n",
        "kfac.factor_update_steps=(1, 0) must be a whole number >= 1",
    ),
    "zero or null": (
        "--kfac.clip=kl --kfac.clip.kl_clip=0",
        "kfac.clip.kl_clip=0.0 must be positive",
    ),
    "more turns than a plan lists": (
        "--refresh.stagger=1001",
        "refresh.stagger=1001 must be at most 1000",
    ),
    "a timer of ages": (
        "--watchdog_timeout=1e9",
        "watchdog_timeout=1000000000.0 must be a finite number > 0",
    ),
    "negative seed": ("--seed=-1", "seed=-1 must be a whole number >= 0 and < 4294967296"),
    "wrong epoch": ("--decay_epochs=[0]", "decay_epochs=[0] must be a list of whole numbers >= 1"),
    "unknown model": ("--model=resnet21", "model=resnet21 is unknown; try one of digits_cnn, mob"),
    "workers": (
        "--assignment=hybrid-opt --assignment.grad_workers=4",
        "grad_workers=4 must divide the number of ranks (6); try one of [1, 2, 3, 6]",
    ),
    "fraction": (
        "--strategy=hybrid --assignment.grad_worker_fraction=0.4",
        "grad_worker_fraction=0.4 of 6 ranks is not a whole number of workers",
    ),
    "workers and fraction": (
        "--strategy=hybrid --assignment.grad_workers=2 --assignment.grad_worker_fraction=0.5",
        "assignment.grad_workers=2 and grad_worker_fraction=0.5 exclude each other; "
        "leave one of them out",
    ),
    "workers of COMM-OPT": (
        "--assignment.grad_workers=2",
        "assignment.grad_workers belongs to assignment=hybrid-opt, not to assignment=comm-opt",
    ),
    "settings of another method": (
        "--sync.rho=0.1",
        "sync.rho belongs to sync=parle, not to sync=synchronous",
    ),
    "settings of a rule that the method has not": (
        "--sync=parle --sync.aggregation.num_byzantine=1",
        "sync.aggregation.num_byzantine belongs to sync=synchronous, local-sgd or diloco, not to "
        "sync=parle",
    ),
    "settings of another rule": (
        "--sync.aggregation.num_byzantine=1",
        "sync.aggregation.num_byzantine belongs to sync.aggregation=trimmed-mean or krum, not to "
        "sync.aggregation=mean",
    ),
    "misspelt setting": (
        "--sync=parle --sync.rhoo=0.1",
        "unknown key sync.rhoo; did you mean sync.rho?",
    ),
    "misspelt method": (
        "--sync=parlé",
        "sync=parlé must be one of synchronous, local-sgd, diloco, daso, lsgd, parle, "
        "parameter-server, FILE.py:CLASS; did you mean parle?",
    ),
    "bad setting": (
        "--sync=local-sgd --sync.sync_every=1",
        "sync.sync_every=1 must be a whole number >= 2",
    ),
    "a sum of a rank's factors": (
        "--compression.factors=top-k",
        "compression.factors=TopK() must be BFloat16(), Int8() or None",
    ),
    "ranks per node": (
        "--transport.ranks_per_node=4",
        "ranks_per_node=4 must divide the number of ranks (6); try one of [1, 2, 3, 6]",
    ),
    "sums everywhere": (
        "--transport.owner_sums=alltoall",
        "transport.owner_sums='alltoall' needs assignment.factor_reduction='reduce_scatter' or ",
    ),
    "choices of auto": (
        "--strategy=auto --machine=v100-edr --refresh.staleness=1",
        "strategy=auto needs a machine and no other choices; got machine=v100-edr and the "
        "choices refresh.staleness",
    ),
    "nobody trains": (
        "--strategy=curvature-servers --refresh.servers=6",
        "refresh.servers=6 must be less than the number of ranks (6)",
    ),
    "no time for curvature servers": (
        "--refresh=curvature-servers --refresh.staleness=0 --batch=10",
        "refresh.staleness=0 must be a whole number >= 1",
    ),
    "batch of training ranks": (
        "--strategy=curvature-servers",
        "batch=12 must be a multiple of the number of ranks (5); try 10 or 15",
    ),
    "parts of training ranks": (
        "--strategy=curvature-servers --batch=60 --transport.virtual_ranks=6",
        "transport.virtual_ranks=6 must be a multiple of the number of ranks (5)",
    ),
    "shrinking with curvature servers": (
        "--strategy=curvature-servers --batch=60 --shrink=true",
        "shrink=true needs refresh=owners, not curvature-servers",
    ),
    "batch of ranks": ("--batch=20", "batch=20 must be a multiple of the number of ranks (6); try"),
    "a batch by epoch of ranks": (
        "batch: 12 until 3, 20\n",
        "batch=20 must be a multiple of the number of ranks (6); try 18 or 24",
    ),
    "a batch by epoch in parts": (
        "batch: 12 until 3, 18\ntransport.virtual_ranks: 12\n",
        "transport.virtual_ranks=12 must divide batch=18",
    ),
    "an interval by epoch of a half": (
        "batch: 12\nkfac: {inv_update_steps: '10 until 3, 20.5'}\n",
        "kfac.inv_update_steps=10 until 3, 20.5 must be a whole number >= 1",
    ),
    "a batch by epoch of 0": (
        "batch: 12 until 3, 0\n",
        "must be a whole number >= 1 or null or a schedule such as",
    ),
    "two batches": ("--batch=12 --batch_per_rank=2", "batch=12 and batch_per_rank=2: set one of"),
    "no data": ("--data.name=cifar10", "data.name=cifar10 needs data.path, the directory"),
    "images of another size": (
        "--model=vit_small",
        "model=vit_small accepts only images of 32x32 pixels, but data.name=digits has 8x8",
    ),
    "made-up images of another size": (
        "--model=vit_small --data.name=synthetic --data.size=16",
        "model=vit_small accepts only images of 32x32 pixels, but data.name=synthetic has 16x16",
    ),
    "an autoencoder of images of another size": (
        "--model=autoencoder",
        "model=autoencoder accepts only images of 28x28 pixels, but data.name=digits has 8x8",
    ),
    "a classifier without labels": (
        "--data.name=curves",
        "model=digits_cnn learns labels, which data.name=curves lacks; try model=autoencoder",
    ),
    "classes of curves": (
        "--model=autoencoder --data.name=curves --data.classes=5",
        "data.classes=5 needs data.name=synthetic, not curves",
    ),
    "a usual name": ("--batch_size=1", "unknown key batch_size; did you mean batch?"),
    "a name of timm": ("--pretrained", "unknown key pretrained; did you mean weights?"),
    "a usual name in a file": ("learning_rate: 1\n", "line 1: unknown key learning_rate; did you"),
    "a name without its group": ("--damping=1", "unknown key damping; did you mean kfac.damping?"),
    "a name spelled alike in its group": (
        "--kfac.momentum=gradients",
        "unknown key kfac.momentum; did you mean kfac.momentum_of?",
    ),
    "a name spelled alike without its group": (
        "--momentum_off=gradients",
        "unknown key momentum_off; did you mean kfac.momentum_of?",
    ),
    "a name with hyphens": ("--weight-decay=1", "key weight-decay; did you mean weight_decay?"),
    "no test": ("--data.test_images=0", "data.test_images=0 must be a whole number >= 1"),
    "unused data": ("--data.path=x", "data.path=x needs data.name=cifar10 or cifar100 or p"),
    "wrong data": ("--data.size=16", "data.size=16 needs data.name=patches or synthetic or "),
    "a shift without augmentation": (
        "--data.shift=2",
        "data.shift=2 needs data.augment=true, not false",
    ),
    "a mirror without augmentation": (
        "--data.mirror=alternating",
        "data.mirror=alternating needs data.augment=true, not false",
    ),
    "no folder": (
        "--data.name=folder",
        "data.name=folder needs data.path, a folder with train/CLASS",
    ),
    "unused processes": (
        "--data.workers=2",
        "data.workers=2 needs data.name=folder or packed, not digits",
    ),
    "a cache of a folder": (
        "--data.name=folder --data.path=x --data.cache=y",
        "data.cache=y needs data.name=packed, not folder",
    ),
    "a shift of images in files": (
        "--data.name=folder --data.path=x --data.augment --data.shift=2",
        "data.shift=2 needs images in memory, not data.name=folder",
    ),
    "unknown data": ("--data.name=mnist", "data.name='mnist' is unknown; try one of digits,"),
    "a file without a function": ("--data.name=a.py", "'a.py' is unknown; try a.py:FUNCTION"),
    "smooth labels of pixels": (
        "--model=autoencoder_small --label_smoothing=0.1",
        "label_smoothing=0.1 needs a classifier, not model=autoencoder_small",
    ),
    "frozen to the end": ("--frozen_epochs=10", "frozen_epochs=10 must be less than epochs=10"),
    "frozen twice": (
        "--frozen_epochs=2 --model=airbench94 --data.name=synthetic",
        "frozen_epochs=2 needs a model other than airbench94: the model itself freezes layers",
    ),
    "frozen layers on curvature servers": (
        "--frozen_epochs=2 --strategy=curvature-servers --batch=60",
        "frozen_epochs=2 needs refresh=owners, not curvature-servers: curvature servers handle "
        "only the layers that are trained from the start",
    ),
    "frozen layers that are split": (
        "--frozen_epochs=2 --split_layers=[10=outputs]",
        "frozen_epochs=2 needs split_layers=[], not ['10=outputs']: layers are split at the start",
    ),
    "frozen layers of a chosen strategy": (
        "--frozen_epochs=2 --strategy=auto --machine=a100-hdr",
        "frozen_epochs=2 needs a named strategy, not auto: the strategy that auto "
        "selects depends on which layers are trained",
    ),
    "frozen layers of copies": (
        "--frozen_epochs=2 --strategy=local-sgd --optimizer=sgd",
        "frozen_epochs=2 needs sync=synchronous, not local-sgd: ranks have different replicas",
    ),
    "mixed labels of pixels": (
        "--model=autoencoder_small --data.mixup=0.2",
        "data.mixup=0.2 needs a classifier, not model=autoencoder_small",
    ),
    "mixed labels of a text": (
        "--model=gpt_small --data.name=text --data.cutmix=1",
        "data.cutmix=1.0 needs a classifier, not model=gpt_small",
    ),
    "no distribution": ("--data.mixup=0", "data.mixup=0.0 must be a finite number > 0 or null"),
    "half a pair": (
        "--data.mixup=0.2 --batch=18",
        "data.mixup=0.2 needs an even number of images per rank, not 3: batch=18 on 6 ranks",
    ),
    "half a pair in later epochs": (
        "batch: 12 until 3, 18\ndata: {cutmix: 1}\n",
        "data.cutmix=1.0 needs an even number of images per rank, not 3: batch=18 on 6 ranks",
    ),
    "Nesterov's momentum of Adam": (
        "--optimizer=adamw --nesterov",
        "and momentum > 0; got optimizer=adamw and momentum=0.9",
    ),
    "Nesterov's momentum of nothing": (
        "--optimizer=sgd --nesterov --momentum=0",
        "nesterov=true needs optimizer=sgd or optimizer=kfac, and momentum > 0; got optimizer=sgd",
    ),
    "Nesterov's momentum twice": (
        "--kfac.momentum_of=gradients --nesterov",
        "nesterov=true needs kfac.momentum_of=directions, not gradients",
    ),
    "momentum of gradients and a clip": (
        "--kfac.momentum_of=gradients --kfac.clip=kl",
        "needs kfac.grafting=adam and no clip; leave out kfac.clip=kl",
    ),
    "falling epochs": (
        "--schedule=step --decay_epochs=[7,3]",
        "decay_epochs=[7, 3] must increase",
    ),
    "unused epochs": (
        "--decay_epochs=[3]",
        "decay_epochs=[3] does not match schedule=linear: schedule=step",
    ),
    "no epochs": (
        "--schedule=step",
        "decay_epochs=[] does not match schedule=step: schedule=step needs",
    ),
    "a length beside the quadratic model": (
        "--kfac.grafting=quadratic-model --momentum=0 --weight_decay=0 --lr=0.1",
        "needs lr=1, schedule=constant, momentum=0 and weight_decay=0; got lr=0.1, schedule=linear",
    ),
    "unused factor": ("--decay_factor=0.5", "decay_factor=0.5 needs schedule=step, not linear"),
    "average of copies": (
        "--ema_decay=0.9 --strategy=local-sgd",
        "ema_decay=0.9 needs sync=synchronous, not local-sgd: ranks have different replicas",
    ),
    "ranks lost with copies": (
        "--shrink=true --sync=local-sgd --sync.sync_every=2 --optimizer=sgd",
        "shrink=true needs sync=synchronous, not local-sgd: ranks have different replicas",
    ),
    "chosen for a baseline": (
        "--optimizer=sgd --strategy=auto --machine=a100-hdr",
        "strategy=auto needs optimizer=kfac, not sgd",
    ),
    "unused share": (
        "--compression.gradients=int8 --compression.gradients.ratio=0.1",
        "compression.gradients.ratio belongs to compression.gradients=top-k, not to ",
    ),
    "shares of an interval": (
        "--strategy=staggered --kfac.inv_update_steps=4",
        "inv_update_steps=4 must be a multiple of refresh.stagger=5",
    ),
    "long warm-up": ("--warmup_epochs=10", "warmup_epochs=10.0 must be less than epochs=10"),
    "resume": (
        "--resume=yes",
        "resume=yes must be never, auto, or the directory of a checkpoint or run",
    ),
    "missing file": ("--config=none.yaml", "config=none.yaml cannot be read: No such file"),
    "directory for a file": (
        "--config=.",
        "config=. cannot be read: it is a directory, not a regular file",
    ),
    "group": ("--kfac=none.yaml", "kfac is a group of options; set one of them, such as --kfac.f"),
    "bad YAML": ("lr: [1\n", "bad.yaml, line 2 is not YAML: expected ',' or ']'"),
    "not text": ("lr: \udcff\n", "bad.yaml is not YAML: invalid start byte"),
    "control character": (
        "a:\nlr: \x07\n",
        "bad.yaml, line 2 is not YAML: special characters are not",
    ),
    "duplicate key": ("lr: 1\nlr: 2\n", "bad.yaml, line 2: lr is given twice; give it once"),
    "dotted duplicate": (
        "kfac.factor_decay: 0\nkfac:\n  factor_decay: 0\n",
        "bad.yaml, line 3: kfac.factor_decay is given twice; give it once",
    ),
    "nested duplicate": (
        "kfac: {factor_decay: 0, factor_decay: 0}\n",
        "line 1: kfac.factor_decay is given twice",
    ),
    "value for a group": ("kfac: 3\n", "bad.yaml: kfac must have lines of the form `key: value`"),
    "list for a file": ("- 1\n", "bad.yaml: the file must have lines of the form `key: value`"),
    "empty file": ("\n", "bad.yaml: the file must have lines of the form `key: value`"),
    "unknown in a file": ("lr: 1\nkfac:\n  foo: 1\n", "bad.yaml, line 3: unknown key kfac.foo; k"),
    "list for a key": ("? [a]\n: 1\n", "bad.yaml, line 1 is not YAML: found unhashable key"),
    "null for a number": ("epochs: 1\nmomentum:\n", "momentum=null must be a finite number"),
    "bool for a count": ("epochs: true\n", "epochs=True must be a whole number >= 1"),
    "number for a name": (
        "optimizer: 1\n",
        "optimizer=1 must be one of kfac, sgd, adamw, muon, soap, lars, lamb",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_refused_in_one_line_with_key_value_and_what_is_allowed(
    name, tmp_path, monkeypatch
):
    """Oracle: every case's line, written from the options' own bounds."""
    given, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    if given.endswith("\n"):
        Path("bad.yaml").write_bytes(given.encode(errors="surrogateescape"))
        given = "--config=bad.yaml"
    arguments = given.split() if "--batch=" in given else ["--batch=12", *given.split()]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(arguments, RANKS)
    assert "\n" not in str(caught.value)


NUMBERS = [leaf for leaf in leaves(Options) if re.search("number", leaf.allowed)]


@pytest.mark.parametrize("digits", [26, 400])
@pytest.mark.parametrize("leaf", NUMBERS, ids=lambda leaf: leaf.key)
def test_every_number_has_a_largest_value(leaf, digits, tmp_path):
    """Oracle: one short line with the key, on the command line and in a file, for every option."""
    text = f"[{'1' * digits}]" if leaf.is_list else "1" * digits
    with pytest.raises(ValueError, match="must") as given:
        parse([f"--{leaf.key}={text}"], 1)
    (tmp_path / "run.yaml").write_text(f"{leaf.key}: {text}\n")
    with pytest.raises(ValueError, match="must be within|is not a value of type int") as read:
        parse([f"--config={tmp_path / 'run.yaml'}"], 1)
    for line in map(str, (given.value, read.value)):
        assert "\n" not in line and len(line) < 300
    assert leaf.key in str(given.value) or digits > 300


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.03 until 2, 0.01", {0: 0.03, 1.99: 0.03, 2: 0.01, 9: 0.01}),
        ("1 until 3, 5 until 6, 10", {0: 1, 2.9: 1, 3: 5, 5.5: 5, 6: 10}),
    ],
)
def test_numbers_by_epoch_are_read_and_written(text, numbers):
    """Oracle: by hand."""
    found = by_epoch.read(text, float)
    assert {epoch: found(epoch) for epoch in numbers} == numbers
    assert by_epoch.read(str(found), float) == found


def test_the_schedule_of_sc20_is_written_in_options():
    """Oracle: by hand: damping halves and intervals grow tenfold, at epochs [SC20]."""
    argv = ["--kfac.damping=0.003 until 40, 0.0015 until 80, 0.00075"]
    options = parse(
        [*argv, "--kfac.inv_update_steps=10 until 40, 100", "--kfac.preconditioner=eigen"], 1
    )
    chosen = {"preconditioner": "eigen", "inv_update_steps": options.kfac.inv_update_steps}
    settings = kfac_settings(options.kfac, chosen, epochs=lambda step: step / 7)
    damping = settings["damping"].value
    assert [damping(7 * epoch) for epoch in (0, 40, 80)] == [0.003, 0.0015, 0.00075]
    assert [settings["inv_update_steps"](step) for step in (0, 279, 280)] == [10, 10, 100]


def test_momentum_of_gradients_is_a_setting_of_kfac():
    """Oracle: by hand: no momentum and 2.5 times the rate for SGD; other optimizers keep both."""
    of_gradients = "--kfac.momentum_of=gradients"
    options = parse([of_gradients, "--momentum=0.8"], 1)
    chosen = {"preconditioner": "inverse", "inv_update_steps": 10}
    assert kfac_settings(options.kfac, chosen, float)["grafting"].momentum == 0.8
    model = models.build("digits_cnn", classes=10, channels=1)
    (group,) = make_optimizer(options, model).param_groups
    assert (group["momentum"], group["lr"]) == (0, 0.0075)
    (group,) = make_optimizer(parse([of_gradients, "--optimizer=sgd"], 1), model).param_groups
    assert (group["momentum"], group["lr"]) == (0.9, 0.1)
    for chosen, filled in (("", "gradients"), ("--kfac.clip=kl", "directions")):
        assert resolved(parse(chosen.split(), 1), 1)["kfac"]["momentum_of"] == filled
    assert resolved(parse(["--optimizer=sgd"], 1), 1)["kfac"]["momentum_of"] is None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_configurations_of_the_project_are_valid(path, ranks):
    """Oracle: the optimizer in the file's name; a batch that the ranks can share."""
    where = ["--data.path=somewhere"] if path.stem.startswith(("cifar10", "imagenet")) else []
    options = parse([f"--config={path}", *where], ranks)
    assert options.optimizer in path.stem
    assert options.batch % ranks == 0


def test_the_published_recipe_scales_and_starts_factors_as_published():
    """Oracle: the code of the SC20 paper, whose averages start at the identity."""
    recipe = Path(__file__).parents[2] / "jobs" / "configs" / "cifar10_resnet20_kfac.yaml"
    chosen = parse([f"--config={recipe}", "--data.path=somewhere"], ranks=1).kfac.estimator
    assert (chosen.normalization, chosen.initial_factor, chosen.factor_decay) == (
        "sc20",
        "identity",
        0.95,
    )


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    """Oracle: the documented precedence of `parse`; 3 ranks of 4 images."""
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-2\nbatch_per_rank: 4\nkfac:\n  damping: 1\n  factor_decay: 0.5\n")
    options = parse([f"--config={file}", "--kfac.damping", "2"], ranks=3)
    assert (options.lr, options.kfac.damping.value, options.kfac.estimator.factor_decay) == (
        0.01,
        2.0,
        0.5,
    )
    assert (options.batch, options.batch_per_rank) == (12, 4)
    assert options.momentum == Options.momentum


def shown(capsys, *arguments):
    """Return the options that a help text names, and the text."""
    with pytest.raises(SystemExit) as leave:
        parse(arguments, ranks=1)
    assert not leave.value.code
    text = capsys.readouterr().out
    return set(re.findall(r"^  --([\w.]+)", text, re.MULTILINE)), text


@pytest.mark.parametrize(
    ("arguments", "ranks", "batch"),
    [
        ([], 1, 256),
        ([], 4, 256),
        ([], 6, 252),
        ([], 300, 300),
        (["--transport.virtual_ranks=12"], 6, 252),
        (["--batch=12"], 6, 12),
        (["--batch_per_rank=3"], 6, 18),
    ],
)
def test_a_batch_that_is_not_given_is_256_or_a_little_less(arguments, ranks, batch):
    """Oracle: the largest multiple of ranks and parts up to 256, by hand."""
    assert parse(arguments, ranks).batch == batch


def test_synonyms_lead_to_options_that_exist():
    """Oracle: the fields of the options."""
    keys = {leaf.key for leaf in leaves(Options)}
    assert set(SYNONYMS.values()) <= keys
    assert not set(SYNONYMS) & keys


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=resnet20"], "made for images of 32x32 pixels, but those of data.name="),
        (["--model=resnet50", "--data.name=synthetic"], "made for images of 224x224 pixels"),
        ([], ""),
        (["--model=resnet50", "--data.name=folder", "--data.path=x"], ""),
        (["--model=resnet20", "--data.name=synthetic"], ""),
        (["--model=digits_cnn", "--data.name=synthetic"], ""),
    ],
)
def test_a_network_for_larger_images_is_doubted(arguments, words):
    """Oracle: sizes of the networks and of the data sets, by hand."""
    found = doubt(parse(arguments, 1))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_name_of_a_type_stands_for_the_type(name):
    """Oracle: all joints, such as `sync` and, inside a type of `sync`, `sync.aggregation`."""
    if not (place := PROGRAMS[name].command_line):
        return  # an example without such options
    module, _, line = place.partition(":")
    command = getattr(import_module(f"mpikfac_apps.{module}"), line)
    joints = [leaf for leaf in possible(command.group).values() if leaf.joint]
    for joint in joints:
        command.answer([f"--{joint.name}=x", f"--{joint.key}=x"])
    assert name != "train" or "sync.aggregation" in {joint.name for joint in joints}


@pytest.mark.parametrize(
    "text",
    [
        "sync.aggregation: krum\nsync.aggregation.num_byzantine: 0\n",
        "sync: {aggregation: krum, aggregation.num_byzantine: 0}\n",
        "sync:\n  aggregation:\n    type: krum\n    num_byzantine: 0\n",
    ],
)
def test_a_type_inside_a_type_is_named_alike_in_files_and_on_the_command_line(tmp_path, text):
    """Oracle: the full key."""
    words = ["--sync.aggregation.type=krum", "--sync.aggregation.num_byzantine=0"]
    expected = flat(TRAIN.read(words))
    (tmp_path / "options.yaml").write_text(text)
    assert flat(TRAIN.read([f"--config={tmp_path}/options.yaml"])) == expected
    TRAIN.answer(short := ["--sync.aggregation", "krum", words[1]])
    assert flat(TRAIN.read(short)) == expected


def test_names_in_help_are_the_names_of_the_tables():
    """Oracle: the tables, whose modules import torch."""
    assert tuple(MODELS) == options.MODELS
    assert tuple(DATASETS) == options.DATASETS


def test_help_has_a_heading_for_each_kind_of_choice(capsys):
    """Oracle: a few options by hand."""
    with pytest.raises(SystemExit):
        parse(["--strategy=dgc", "--sync=parle", "--help_all"], 1)
    sections, heading = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if re.match(r"\S.*:$", line):
            heading = line
        if key := re.match(r"  --([\w.]+)", line):
            sections[key[1]] = heading
    expected = {"lr": "learning rate", "kfac.damping": "K-FAC: damping", "data.path": "data"}
    expected |= {"sync": "strategy", "sync.rho": "sync=parle: ", "refresh.staleness": "owners: "}
    expected |= {"compression.gradients": "How values are encoded"}
    expected |= {"compression.gradients.ratio": "gradients=top-k: "}
    assert {key: words in sections[key] for key, words in expected.items()} == dict.fromkeys(
        expected, True
    )
    assert max(Counter(sections.values()).values()) <= 16


def test_help_has_two_lengths_and_names_every_option_and_model(capsys):
    """Oracle: the fields of the options, the basic options, the keys of `MODELS`."""
    brief, text = shown(capsys, "--help")
    shown_keys = {key.removesuffix(".type") for key in BASIC}
    assert brief - {"config", "print_config", "help_all"} == shown_keys
    names = r"digits_cnn|airbench94|resnet\d+|\w+_small|autoencoder\b|segmenter3d"
    assert set(re.findall(names, text)) == set(MODELS)
    whole, text = shown(capsys, "--help_all")
    assert whole - {"config", "print_config"} == {leaf.name for leaf in leaves(Options)}
    assert " ".join(text.split()).count("default: ") == len(leaves(Options))


def test_a_printed_configuration_is_a_file_of_all_options(capsys, tmp_path):
    """Oracle: the fields of the options, and the options that were given."""
    with pytest.raises(SystemExit):
        parse(["--batch=12", "--refresh.staleness=2", "--print_config"], RANKS)
    text = capsys.readouterr().out
    assert set(flattened(yaml.safe_load(text))) == {leaf.key for leaf in leaves(Options)}
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert parse([f"--config={file}"], RANKS) == parse(
        ["--batch=12", "--refresh.staleness=2"], RANKS
    )


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ("", 4),
        ("--strategy=mem-opt", 1),
        ("--strategy=hybrid", 2),
        ("--strategy=hybrid --assignment.grad_workers=1", 1),
        ("--strategy=hybrid --assignment.grad_worker_fraction=0.25", 1),
        ("--assignment=hybrid-opt --assignment.grad_workers=2", 2),
    ],
)
def test_strategies_by_name(given, workers):
    """Oracle: workers of 4 ranks by every strategy's definition."""
    options = parse(["--batch=4", "--assignment.shard_optimizer=true", *given.split()], ranks=4)
    strategy, _ = make_strategy(options.distribution, options.kfac, 4)
    assert strategy.assignment.workers(4) == workers and strategy.assignment.shard_optimizer


def test_a_machine_does_not_overrule_what_is_asked():
    """Oracle: the options; without options, the machine's choice."""
    shapes = models.shapes_of("resnet50")

    def chosen(*more):
        given = ["--model=resnet50", "--batch=128", "--machine=v100-edr", *more]
        options = parse(["--strategy=spd-kfac", *given], 4)
        strategy, settings = make_strategy(options.distribution, options.kfac, 4)
        return for_machine(options, shapes, 4, strategy, settings)[1]

    tuned = chosen()
    assert isinstance(tuned.transport.fusion, tuple)
    assert tuned.assignment.replicate_below not in (0, 100)
    mine = chosen("--transport.fusion=7", "--assignment.replicate_below=100")
    assert (mine.transport.fusion, mine.assignment.replicate_below) == (7, 100)


def test_a_resolved_configuration_starts_the_same_run(tmp_path):
    """Oracle: the same strategy and options; of the choices of a strategy, no number is null."""
    given = parse(["--batch_per_rank=2", "--transport.overlap=true", "--transport.fusion=3"], RANKS)
    values = resolved(given, RANKS)
    assert (values["batch"], values["batch_per_rank"]) == (12, None)
    assert values["kfac"]["preconditioner"]["type"] == "inverse"
    assert values["refresh"] == {"type": "owners", "staleness": 0, "stagger": 1, "tolerance": 0.0}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    again = parse([f"--config={file}"], RANKS)
    assert resolved(again, RANKS) == values
    strategy, _ = make_strategy(again.distribution, again.kfac, RANKS)
    assert strategy == make_strategy(given.distribution, given.kfac, RANKS)[0]
    assert (strategy.transport.overlap, strategy.transport.fusion) == (True, 3)


@pytest.mark.parametrize("name", mpikfac.plan.NAMED)
def test_every_strategy_is_resolved_to_itself(name):
    """Oracle: the strategy by its name."""
    more = {"downpour": ["--optimizer=sgd"]}
    asked = (f"--strategy={name}", *more.get(name, []))
    given = parse(["--batch=60", *asked], RANKS)
    training = training_ranks(given, RANKS)
    values = flattened(resolved(given, training))
    words = (v if isinstance(v, str) else json.dumps(v) for v in values.values())
    again = parse([f"--{key}={word}" for key, word in zip(values, words)], RANKS)
    strategies, settings = zip(
        *(make_strategy(one.distribution, one.kfac, training) for one in (given, again))
    )
    assert strategies[0] == strategies[1]
    if given.optimizer == "kfac":
        assert {**settings[0], "preconditioner": preconditioner_of(settings[0])} == settings[1]
    assert flat(again) == flattened(resolved(again, training))


def rates(ranks, steps, **chosen):
    options = Options(**({"lr": 0.1, "epochs": 10} | chosen))
    rate = learning_rate(options, steps_per_epoch=2, ranks=ranks)
    return [rate(step) for step in steps]


def test_the_linear_schedule_ends_at_0_with_the_last_epoch():
    """Oracle: 0.1 (1 - step / 20) at 10 epochs of 2 steps."""
    assert rates(4, [0, 10, 19, 20]) == pytest.approx([0.1, 0.05, 0.005, 0])


def test_the_cosine_schedule_is_torchs():
    """Oracle: CosineAnnealingLR over 10 epochs of 2 steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    expected = []
    for _ in range(21):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates(4, range(21), schedule="cosine") == pytest.approx(expected, abs=1e-12)


def test_the_step_schedule_decays_at_its_epochs():
    """Oracle: a tenth at steps 6 and 14, the first steps of epochs 3 and 7."""
    chosen = {"schedule": "step", "decay_epochs": [3, 7]}
    assert rates(1, [0, 5, 6, 13, 14], **chosen) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


def test_a_rate_scaled_by_ranks_warms_up_from_the_unscaled_rate():
    """Oracle: lines over 4 steps from lr to 4 lr, or to 2 lr by the root; none on one rank."""
    chosen = {"schedule": "constant", "scale_lr": "linear", "warmup_epochs": 2}
    assert rates(4, [0, 2, 4, 19], **chosen) == pytest.approx([0.1, 0.25, 0.4, 0.4])
    assert rates(1, [0, 2, 4, 19], **chosen) == pytest.approx([0.1] * 4)
    chosen["scale_lr"] = "sqrt"
    assert rates(4, [0, 2, 4, 19], **chosen) == pytest.approx([0.1, 0.15, 0.2, 0.2])
    assert rates(1, [0, 2, 4, 19], **chosen) == pytest.approx([0.1] * 4)


def test_a_warm_up_never_has_rate_0():
    """Oracle: 0, which would waste a step."""
    assert min(rates(2, range(4), warmup_epochs=2)) > 0


def test_every_option_is_explained():
    """Oracle: the fields of the options; help and page take an option's text from the docstring."""
    kinds = [kind for kind in vars(options).values() if dataclasses.is_dataclass(kind)]
    own = [kind for kind in kinds if kind.__module__ == options.__name__]
    assert len(own) > 5
    explained = {kind: " ".join(base.__doc__ or "" for base in kind.__mro__) for kind in own}
    unexplained = [
        f"{kind.__name__}.{field.name}"
        for kind, text in explained.items()
        for field in dataclasses.fields(kind)
        if not field.metadata.get("inline")
        and not re.search(rf"^ {{8}}(\w+, )*{field.name}(, \w+)*: ", text, re.MULTILINE)
    ]
    assert unexplained == []


@pytest.mark.parametrize("key", ["run_dir", "resume", "data.path", "data.cache"])
def test_the_home_directory_stands_for_a_tilde(key, tmp_path, monkeypatch):
    """Oracle: by hand; on the command line and in a file in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home.yaml").write_text(f"{key}: ~/there\n")
    for argument in (f"--{key}=~/there", "--config=~/home.yaml"):
        assert flat(TRAIN.read([argument]))[key] == str(tmp_path / "there")


def test_the_home_directory_stands_for_a_tilde_in_paths_of_other_programs(tmp_path, monkeypatch):
    """Oracle: by hand; a path that must be given, and one with a suffix."""
    monkeypatch.setenv("HOME", str(tmp_path))
    inspected = INSPECT.read(["~/run", "--picture=~/factors.pdf"])
    assert (inspected.path, inspected.picture) == (tmp_path / "run", tmp_path / "factors.pdf")
