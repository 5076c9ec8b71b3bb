"""Networks of files and of timm, first weights of files, and passes of a step, in training."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac_apps.inspecting import export, weights
from mpikfac_apps.lab.study.spec import plan_of
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import parse
from mpikfac_apps.planning import plan
from mpikfac_apps.problems import models, own
from mpikfac_apps.training import train
from programs.plain import NETWORKS, plain
from support import zoo
from support.launch import run_each

TIMES = ("seconds", "images_per_second", "communication")
QUICK = ("--batch=120", "--data.train_images=360", "--epochs=2", "--log_every=2", "--threads=1")
PRECONDITIONERS = {
    "sgd": ("--optimizer=sgd",),
    "kfac": ("--kfac.inv_update_steps=2",),
    "ekfac": ("--kfac.preconditioner=ekfac", "--kfac.damping=0.01", "--kfac.inv_update_steps=2"),
    "exact": ("--kfac.fisher_type=type-2", "--kfac.subsample=2"),
}
FILE = """
import mpikfac
from torch import nn
from mpikfac_apps.problems.resnet import conv

class Own(nn.Linear):
    pass

COVERS = {**mpikfac.KINDS, Own: mpikfac.Layer}

def told(classes, channels):
    layers = conv(channels, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), Own(128, classes)
    return nn.Sequential(*layers)

def half(classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def fixed():
    return half(7)
"""


def arguments(run_dir, *more):
    return [*QUICK, f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


def saved(run_dir):
    """Return the last checkpoint."""
    path = mpikfac.checkpoint.latest_checkpoint(run_dir / "checkpoints")
    return mpikfac.checkpoint.read_checkpoint(path)


def refused(capfd, *options):
    """Return the only line of a run that ends with code 2."""
    with pytest.raises(SystemExit) as leave:
        train.main(list(options))
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.fixture
def file(tmp_path):
    """Return the path of a file with networks."""
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


# -- networks of files -----------------------------------------------------------------------------


@pytest.mark.gate
def test_a_network_of_a_file_trains_as_a_network_by_name(file, tmp_path, monkeypatch):
    """Oracle: the same network by name, which keeps the layers' own first weights; its layers."""
    monkeypatch.setitem(models.MODELS, "plain", models.NetworkEntry(plain, draw=None))
    assert train.main(arguments(tmp_path / "name", "--model=plain")) == 0
    assert train.main(arguments(tmp_path / "file", f"--model={file}:told")) == 0
    assert rows(tmp_path / "file") == rows(tmp_path / "name")
    assert [n for n in saved(tmp_path / "file") if "4.A" in n]  # COVERS covers `Own`


def test_a_function_is_told_the_numbers_that_it_takes(file):
    """Oracle: the shapes of the last layer, by hand."""

    def outputs(function, *numbers):
        return models.build(f"{file}:{function}", *numbers)[-1].out_features

    assert [outputs("told"), outputs("told", 4, 1), outputs("half"), outputs("half", 4)] == [
        *(10, 4, 3, 4),
    ]
    assert outputs("fixed", 4) == 7
    assert models.build(f"{file}:told", 4, 2)[0].in_channels == 2


def test_a_plan_is_the_plan_of_the_run(file):
    """Oracle: the plan of the library for the same module, by its digest."""
    options = Options(model=f"{file}:told", batch=120)
    module = models.build(f"{file}:told", 10, 1)
    covers = models.network(f"{file}:told").covers
    shapes = mpikfac.layers.covered_shapes(module, mpikfac.Coverage(covers=covers))
    expected = mpikfac.make_plan(shapes[0], 2, mpikfac.Strategy(), shapes[1])
    assert plan_of(options, 2).digest() == expected.digest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixed", "fixed returns [7] for an image, but the data has 10 classes; give the"),
        ("absent", "own.py has no function 'absent'"),
    ],
)
def test_a_network_that_cannot_learn_the_data_is_one_line(file, tmp_path, capfd, name, message):
    """Oracle: the messages, written out."""
    assert message in refused(capfd, *arguments(tmp_path / "run", f"--model={file}:{name}"))
    assert not (tmp_path / "run").exists()


def test_classes_of_a_function_without_classes_are_refused(file, capsys):
    """Oracle: the message, written out."""
    assert plan.main([f"--model={file}:fixed", "--classes=3", "--ranks=2"]) == 2
    assert (
        "classes=3 needs a network with a parameter named classes, unlike "
        in capsys.readouterr().err
    )


VIT_L = """
import torch
from torch import nn

MEAN = torch.ones(3)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

def build(classes=1000, width=1024, depth=24):
    blocks = [Block(width) for _ in range(depth)]
    made = nn.Sequential(nn.Conv2d(3, width, 16, 16), *blocks, nn.Linear(width, classes))
    made.register_buffer("mean", MEAN)
    return made

def reads():
    assert torch.arange(3).sum().item() == 3
    return build(10, 64, 2)

def small():
    return build(10, 64, 2)
"""


@pytest.mark.gate
def test_a_large_network_of_a_file_is_planned_without_its_weights(tmp_path):
    """Oracle: ViT-L's 303 million parameters, which would take 1.2 GB; a process takes 0.3 GB."""
    (tmp_path / "large.py").write_text(VIT_L)
    model = models.skeleton(f"{tmp_path / 'large.py'}:build")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(303e6, rel=0.01)
    assert all(parameter.is_meta for parameter in model.parameters())
    program = (  # getrusage would count the memory of the process that starts this one, too
        "import pathlib, re, sys; from mpikfac_apps.planning.plan import main; "
        "code = main(sys.argv[1:]); status = pathlib.Path('/proc/self/status').read_text(); "
        "print(code, 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]))"
    )
    asked = [
        f"--model={tmp_path / 'large.py'}:build",
        "--ranks=1024",
        "--strategy=deferred-sharded",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", program, *asked], capture_output=True, text=True, check=True
    )
    code, most = map(int, ended.stdout.splitlines()[-1].split())
    assert code == 0 and most < 0.8e9


def test_a_network_that_reads_numbers_is_planned_like_any_other(tmp_path):
    """Oracle: the shapes of the same network, made by a function that reads nothing.

    A block has four layers: the inputs and the output of attention, up and down.
    """
    file = tmp_path / "large.py"
    file.write_text(VIT_L)
    with torch.device("meta"), pytest.raises(ValueError, match="reads"):
        models.build(f"{file}:reads")
    assert models.shapes_of(f"{file}:reads") == models.shapes_of(f"{file}:small")
    assert len(models.shapes_of(f"{file}:small")[0]) == 2 + 2 * 4


def test_a_file_runs_with_real_tensors(tmp_path):
    """Oracle: the buffer, which a network made later shares with the file."""
    (tmp_path / "large.py").write_text(VIT_L)
    models.skeleton(f"{tmp_path / 'large.py'}:small")
    model = models.build(f"{tmp_path / 'large.py'}:small")
    assert torch.equal(model.mean, torch.ones(3))


# -- networks of timm ------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_network_of_timm_is_planned_and_trained(tmp_path, capsys, monkeypatch):
    """Oracle: timm's own network: its covered layers; losses fall; one line for a wrong name."""
    if missing := zoo.missing():
        pytest.skip(f"{' and '.join(missing)} not installed")
    timm = zoo.timm()
    name = "timm:test_resnet"
    found, _ = models.shapes_of(name)
    module = timm.create_model("test_resnet", num_classes=1000)
    assert found == mpikfac.layers.covered_shapes(module)[0]
    options = ("--data.name=synthetic", "--data.train_images=128", "--batch=32", "--epochs=3")
    assert train.main([*options, f"--model={name}", f"--run_dir={tmp_path}/run"]) == 0
    losses = [row["train_loss"] for row in rows(tmp_path / "run") if "train_loss" in row]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="model=timm:resnet19 is not a timm network; did you"):
        models.network("timm:resnet19")
    with pytest.raises(ValueError, match="images of 224x224 pixels, but data.name=synthetic"):
        parse([*options, "--model=timm:vit_tiny_patch16_224"], 1)
    trained = "timm:test_resnet.r160_in1k is not a timm network without weights: r160_in1k "
    with pytest.raises(ValueError, match=trained):  # timm would draw weights without a word
        models.network("timm:test_resnet.r160_in1k")


@pytest.mark.gate
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_timm_saves_are_first_weights(tmp_path, suffix):
    """Oracle: timm's own state_dict; a classifier of 1000 classes is left out, for 10 classes."""
    if missing := zoo.missing():
        pytest.skip(f"{' and '.join(missing)} not installed")
    donor = zoo.timm().create_model("test_resnet", num_classes=1000)
    nn.init.normal_(donor.bn1.running_mean)
    file = tmp_path / f"donor{suffix}"
    export.write(file, donor.state_dict())
    options = ("--data.name=synthetic", "--data.train_images=32", "--batch=32", "--lr=1e-30")
    options += ("--optimizer=sgd", "--weight_decay=0", "--max_steps=1", f"--weights={file}")
    assert train.main([*options, "--model=timm:test_resnet", f"--run_dir={tmp_path}/run"]) == 0
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "tensors that keep their initial values: fc.weight, fc.bias" in said
    checkpoint = saved(tmp_path / "run")
    for name, parameter in donor.named_parameters():
        if not name.startswith("fc."):
            torch.testing.assert_close(checkpoint[f"model/{name}"], parameter.detach())


def test_a_checkpoint_of_timms_training_is_one_line(tmp_path):
    """Oracle: the form of timm's checkpoints: the state_dict is one of several entries."""
    file = tmp_path / "last.pth.tar"
    torch.save({"epoch": 3, "arch": "resnet18", "state_dict": small().state_dict()}, file)
    with pytest.raises(ValueError, match="must contain only a state_dict, which maps"):
        weights.read(file, small())


def test_without_timm_there_is_one_line(monkeypatch):
    """Oracle: a package that cannot be imported."""
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ValueError, match="model=timm:NAME needs the packages timm and torchvision"):
        models.network("timm:resnet18")


def test_a_torchvision_of_another_build_is_one_line(tmp_path, monkeypatch):
    """Oracle: the error of a torchvision for CUDA beside a torch for CPUs."""
    error = "operator torchvision::nms does not exist"
    (tmp_path / "timm.py").write_text(f"raise RuntimeError({error!r})")
    monkeypatch.delitem(__import__("sys").modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    told = f"{error}; run pip install timm torchvision==0.28.0 --extra-index-url .*/whl/cu130$"
    with pytest.raises(ValueError, match=told) as refused:
        models.network("timm:resnet18")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "package"),
    [
        ("2.9.1+cpu", r"torchvision==0\.24\.1 --extra-index-url \S+/whl/cpu"),
        ("2.14.1+rocm7.1", r"torchvision==0\.29\.1 --extra-index-url \S+/whl/rocm7\.1"),
        ("2.9.0", r"torchvision==0\.24\.0, in the same build as torch 2\.9\.0"),
        ("2.10.0a0+b4e4ee81d3.nv25.12", r"torchvision, in the same build as torch 2\.10\.0a0\+\S+"),
    ],
)
def test_a_torchvision_belongs_to_a_torch(version, package):
    """Oracle: the published pairs 2.9.1 and 0.24.1, 2.14.1 and 0.29.1; others have no number."""
    assert re.fullmatch(package, own.torchvision_of(version))


# -- first weights ---------------------------------------------------------------------------------


def small(classes=10, hidden=6):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_of_a_file_are_loaded_but_for_the_last_module(tmp_path, suffix):
    """Oracle: torch's state_dict; a classifier of another size keeps its values."""
    donor = small()
    nn.init.normal_(donor[1].running_mean)
    file = tmp_path / f"donor{suffix}"
    export.write(file, donor.state_dict())
    whole, other = small().requires_grad_(False), small(classes=3)
    nn.init.zeros_(whole[0].weight)
    kept = {name: value.clone() for name, value in other[2].state_dict().items()}
    assert weights.load(whole, weights.read(file, whole)) == []
    assert weights.load(other, weights.read(file, other)) == ["2.weight", "2.bias"]
    for name, value in donor.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value)
        assert torch.equal(other.state_dict()[name], kept[name[2:]] if name[0] == "2" else value)


def test_weights_of_another_network_are_refused(tmp_path):
    """Oracle: the first wrong tensor, and the network as before."""
    model, wide = small(), small(hidden=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = r"0.weight has shape \[7, 4\] in the file and shape \[6, 4\] in the network, and 5 more"
    with pytest.raises(ValueError, match=wrong):
        weights.load(model, wide.state_dict())
    with pytest.raises(ValueError, match="x has shape .* in the file and no such tensor in the"):
        weights.load(model, {**model.state_dict(), "x": torch.ones(2)})
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_without_safetensors_there_is_one_line(tmp_path, capfd, monkeypatch):
    """Oracle: the message, written out; a package that cannot be imported."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    told = "w.safetensors needs the package safetensors, which is not installed; run pip install"
    assert told in refused(capfd, *arguments(tmp_path / "run", "--weights=w.safetensors"))


class Harm:
    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"text", "is not a file of weights: "),
        ({"weight": Harm()}, "is not a file of weights: "),
        ({"epoch": 3}, "must contain only a state_dict, which maps names to tensors"),
        ([torch.ones(2)], "must contain only a state_dict"),
    ],
)
def test_a_file_without_weights_is_one_line_and_runs_nothing(tmp_path, capsys, content, message):
    """Oracle: the messages; a pickle that would print."""
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError) as caught:
        weights.read(file, small())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "harm" not in capsys.readouterr().out


def packed(file):
    """Write a state_dict of 256 MiB of zeros, deflated, without the zeros in memory."""
    torch.save({"2.weight": torch.zeros(9)}, file.with_suffix(".tensor"))
    plain = zipfile.ZipFile(file.with_suffix(".tensor"))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name in plain.namelist():
            blocks = [plain.read(name)] if "/data/" not in name else [bytes(2**20)] * 2**8
            with made.open(name, "w") as record:
                for block in blocks:
                    record.write(block)


def overlapping(file):
    """Write a file whose tensor repeats 4 bytes 2^33 times."""
    torch.save({"2.weight": torch.zeros(1).expand(2**33)}, file)


def holes(file):
    """Write a file of 20 GiB without content."""
    file.touch()
    os.truncate(file, 20 * 2**30)


@pytest.mark.parametrize(
    ("make", "suffix", "message"),
    [
        (packed, ".pt", "its records must not be compressed: "),
        (overlapping, ".pt", "2.weight is larger than the file"),
        (holes, ".pt", "it has 21,474,836,480 bytes; at most 1,073,7"),
        (holes, ".safetensors", "it has 21,474,836,480 bytes; at most 1,073,7"),
    ],
)
def test_a_file_of_weights_has_a_largest_size(tmp_path, make, suffix, message):
    """Oracle: one line, and no more memory than twice the file and 64 MiB."""
    file = tmp_path / f"weights{suffix}"
    make(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError) as caught:
        weights.read(file, small())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


# -- several passes, and passes in bfloat16 --------------------------------------------------------


def runs(root):
    """Yield ranks and options of runs on several ranks."""
    for passes in (1, 4):
        chosen = (*PRECONDITIONERS["kfac"], "--model=plain", f"--accumulate={passes}")
        yield 2, arguments(root / f"{passes} passes", *chosen)
    torch.save(plain(10, 1).state_dict(), root / "donor.pt")
    still = ("--optimizer=sgd", "--lr=1e-30", "--model=plain", "--max_steps=1")
    for run in ("begun", "resumed"):
        more = ("--resume=auto", "--max_steps=2") if run == "resumed" else ()
        yield 2, arguments(root / "begun", *still, f"--weights={root}/donor.pt", *more)


def assert_same_training(found, expected):
    """Check that the numbers of both runs agree to rounding, step by step."""
    for key in ("step", "loss", "train_loss", "test_loss"):
        numbers = [[row[key] for row in lines if key in row] for lines in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4), key


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the directory of `runs`."""
    root = tmp_path_factory.mktemp("runs")
    run_each(list(runs(root)), root)
    return root


@pytest.mark.slow
def test_two_ranks_step_by_several_passes_as_by_one(ran):
    """Oracle: the whole share of a rank in one pass; no BatchNorm."""
    assert_same_training(rows(ran / "4 passes"), rows(ran / "1 passes"))


@pytest.mark.gate
@pytest.mark.parametrize("name", ["sgd", "ekfac", "exact"])
def test_several_passes_are_one_step(tmp_path, monkeypatch, name):
    """Oracle: the whole batch in one pass; no BatchNorm."""
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, **NETWORKS})
    for passes in (1, 5):
        chosen = (*PRECONDITIONERS[name], "--model=plain", f"--accumulate={passes}")
        assert train.main(arguments(tmp_path / str(passes), *chosen)) == 0
    assert_same_training(rows(tmp_path / "5"), rows(tmp_path / "1"))


@pytest.mark.slow
def test_first_weights_reach_all_ranks_and_a_resumed_run_takes_its_own(ran):
    """Oracle: the file; steps of length 0. A checkpoint compares the weights of the ranks."""
    donor, found = torch.load(ran / "donor.pt"), saved(ran / "begun")
    assert found.step == 2
    for name, value in donor.items():
        assert torch.equal(found[f"model/{name}"], value)
    said = (ran / "begun" / "log.txt").read_text()
    assert said.count("tensors that keep their initial values: none") == 1
    assert said.count("donor.pt is ignored: the run continues from a checkpoint") == 1


class Rounded(nn.Module):
    """Autocast's computation, written out: input, weight and bias are rounded."""

    def forward(self, x):
        return self.computed(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class Linear(Rounded, nn.Linear):
    computed = staticmethod(F.linear)


class Conv2d(Rounded, nn.Conv2d):
    def computed(self, *args):
        return F.conv2d(*args, self.stride, self.padding)


def rounding(kinds):
    """Return a function that makes a network of a convolution and a linear layer."""

    def make(classes, channels):
        conv, linear = kinds
        layers = conv(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        return nn.Sequential(*layers, linear(128, classes))

    return make


@pytest.mark.gate
@pytest.mark.parametrize("name", ["sgd", "kfac"])
def test_passes_in_bfloat16_round_products(tmp_path, monkeypatch, name):
    """Oracle: a network that rounds by hand; float32 gives other numbers."""
    covers = {Linear: mpikfac.KINDS[nn.Linear], Conv2d: mpikfac.KINDS[nn.Conv2d]}
    by_hand = models.NetworkEntry(rounding((Conv2d, Linear)), covers=covers)
    monkeypatch.setitem(models.MODELS, "by hand", by_hand)
    monkeypatch.setitem(models.MODELS, "net", models.NetworkEntry(rounding((nn.Conv2d, nn.Linear))))
    for run, more in {"hand": "by hand", "cast": "net", "float32": "net"}.items():
        cast = ("--autocast=bfloat16",) if run == "cast" else ()
        chosen = arguments(tmp_path / run, *PRECONDITIONERS[name], f"--model={more}", *cast)
        assert train.main(chosen) == 0
    assert_same_training(rows(tmp_path / "cast"), rows(tmp_path / "hand"))
    losses = [rows(tmp_path / run)[-1]["test_loss"] for run in ("cast", "float32")]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--accumulate=7", "accumulate=7 must divide the 120 images per rank of batch"),
        (
            "--accumulate=2 --transport.virtual_ranks=2",
            "accumulate=2 needs transport.virtual_ranks=null, not 2",
        ),
        ("--accumulate=2 --transport.overlap", "accumulate=2 needs transport.overlap=false"),
        (
            "--autocast=bfloat16 --kfac.grafting=quadratic-model --schedule=constant --momentum=0 "
            "--weight_decay=0",
            "autocast=bfloat16 needs a kfac.grafting other than quadratic-model",
        ),
    ],
)
def test_passes_that_do_not_fit_are_refused(given, message):
    """Oracle: the messages, written out."""
    with pytest.raises(ValueError, match="^" + message):
        parse([*QUICK, *given.split()], 1)
