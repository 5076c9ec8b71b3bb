"""The detection program with torchvision: learning, equal ranks, restarts, and factors."""

from __future__ import annotations

import importlib.util
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac.numerics import triangles
from mpikfac_apps.detection import networks, precision, shapes
from support.launch import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None,
        reason="torchvision not installed: see docs/extensions/detection.md",
    ),
]

PROGRAM = ("-m", "mpikfac_apps", "train-detection")
RECORDS = {"run/seconds", "run/metrics_bytes"}
SHORT = ("--size=32", "--images=24", "--test_images=4", "--batch=4", "--epochs=3", "--device=cpu")


def model_of(size=32):
    torch.manual_seed(0)
    return networks.build("small", len(shapes.CLASSES), size)


def trained(ranks, run_dir, *more):
    """Return the lines about epochs of a run, and the losses of epochs."""
    ended = launch(ranks, *PROGRAM, *SHORT, f"--run_dir={run_dir}", *more)
    assert ended.returncode == 0, ended.stderr
    assert "different numbers of examples" not in ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("epoch ")]
    losses = [float(re.match(r"epoch \d+: loss ([\d.]+),", line)[1]) for line in lines]
    return [line.rpartition(",")[0] for line in lines], losses  # without seconds


@pytest.mark.parametrize(("optimizer", "lr"), [("kfac", 0.003), ("sgd", 0.02)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_fall_and_weights_stay_equal(tmp_path, ranks, optimizer, lr):
    """Oracle: the loss of the first epoch; a checkpoint is refused if ranks hold other weights."""
    batch = 4 if ranks < 3 else 6
    chosen = f"--optimizer={optimizer}", f"--lr={lr}", f"--batch={batch}"
    _, losses = trained(ranks, tmp_path / "run", *chosen)
    assert len(losses) == 3 and losses[2] < 0.9 * losses[0]
    checkpoint = mpikfac.checkpoint.read_checkpoint(
        tmp_path / "run" / "checkpoints" / f"step-{3 * 24 // batch:09d}"
    )
    weights = {name: checkpoint[f"model/{name}"] for name in model_of().state_dict()}
    assert not all(map(torch.equal, weights.values(), model_of().state_dict().values()))


def test_a_restarted_run_is_the_run(tmp_path):
    """Oracle: the lines and the checkpoint of a run without restart, to the last bit."""
    arguments = ("--kfac.workers=1", "--kfac.inv_update_steps=4", "--checkpoint_every=13")
    whole, _ = trained(2, tmp_path / "run", *arguments)
    last = tmp_path / "run" / "checkpoints" / "step-000000018"
    expected = mpikfac.checkpoint.read_checkpoint(last)
    kept = {name: expected[name] for name in expected}
    shutil.rmtree(last)
    rest, _ = trained(2, tmp_path / "run", *arguments, "--resume=auto")
    assert rest == whole[2:]
    found = mpikfac.checkpoint.read_checkpoint(last)
    assert set(found) == set(kept)
    for name in set(kept) - RECORDS:
        value = kept[name]
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, name


def test_wrong_options_of_kfac_are_refused_in_one_line():
    """Oracle: the lines."""
    for argument, text in (
        ("--kfac.workers=3", "workers=3 must divide the number of ranks (2)"),
        ("--kfac.skip=[backbones]", "skip names 'backbones', which is not a module of the model"),
    ):
        ended = launch(2, *PROGRAM, *SHORT, argument)
        assert ended.returncode == 2
        assert ended.stderr.splitlines()[0].startswith(f"mpikfac: options: {text}")


def test_factors_of_boxes_and_of_a_head_called_on_every_level():
    """Oracle: vectors of all calls by im2col, with gradients that own hooks have kept."""
    model = model_of()
    coverage = mpikfac.Coverage(own_examples=[networks.HEADS])
    kfac = mpikfac.KFAC(
        model, torch.optim.SGD(model.parameters(), 0.1), mpikfac.world(), coverage=coverage
    )
    calls = {"rpn.head.conv.0.0": [], "roi_heads.box_head.fc6": [], "roi_heads.mask_head.0.0": []}
    for name, kept in calls.items():
        model.get_submodule(name).register_forward_hook(keeping(kept))
    images, targets = zip(*(shapes.Shapes(range(3), 32, seed=0)[n] for n in range(3)))
    sum(model(list(images), list(targets)).values()).backward()
    counts = {name: [len(x) for x, _ in kept] for name, kept in calls.items()}
    assert counts["rpn.head.conv.0.0"] == [3, 3]  # two levels
    assert all(len(counts[name]) == 1 and counts[name][0] > 3 for name in list(counts)[1:])
    kfac.step()
    state = kfac.state_dict()
    for name, kept in calls.items():
        a, g = (torch.cat(rows) for rows in zip(*(vectors(*call) for call in kept)))
        for side, moment in (("A", a.T @ a / len(a)), ("G", counts[name][0] * g.T @ g)):
            found = triangles.unfold_triangle(state[f"kfac/factors/{name}.{side}"])
            scale = float(moment.abs().max())
            torch.testing.assert_close(found / scale, moment / scale, rtol=1e-4, atol=1e-5)
    assert len(kfac.plan.layers) == sum(hasattr(module, "weight") for module in model.modules())


def keeping(kept):
    """Return a hook that keeps inputs, and gradients of outputs, of a module's calls."""

    def hook(module, inputs, output):
        call = [inputs[0].detach().clone(), None]
        kept.append(call)
        output.register_hook(lambda g: call.__setitem__(1, g.clone()))

    return hook


def vectors(x, g):
    """Return the vectors `a`, with a 1 for the bias, and `g` of a call."""
    if x.dim() == 4:
        x, g = F.unfold(x, 3, padding=1).mT.flatten(0, 1), g.flatten(2).mT.flatten(0, 1)
    return F.pad(x, (0, 1), value=1.0), g


def test_overlaps_are_those_of_torchvision():
    """Oracle: `torchvision.ops.box_iou`."""
    vision = networks.torchvision()
    corners = torch.rand(2, 20, 4) * 10
    boxes = torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)
    expected = vision.ops.box_iou(*boxes)
    torch.testing.assert_close(precision.overlaps_of_boxes(*boxes), expected)


def test_the_usual_network_is_made():
    """Oracle: a factor of 256 channels of 7 x 7 pixels and a bias, and the number of layers."""
    model = networks.build("resnet50", len(shapes.CLASSES), 64)
    layers, _ = mpikfac.layers.cover(model)
    orders = {layer.name: layer.shape.inputs for layer in layers}
    assert orders["roi_heads.box_head.fc6"] == 256 * 7 * 7 + 1
    assert "roi_heads.mask_predictor.conv5_mask" in orders and "backbone.body.conv1" in orders
