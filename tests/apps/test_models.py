from __future__ import annotations

import pytest
import torch

from mpikfac_apps.problems import models
from mpikfac_apps.problems.resnet import PadShortcut

# He et al. (CVPR 2016), table 6, give 0.27, 0.46, 0.66, 0.85 and 1.7 million for 32x32; the counts
# for ImageNet are the counts of torchvision's networks of the same names.
PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
IN_MILLIONS = {
    "resnet20": 0.27,
    "resnet32": 0.46,
    "resnet44": 0.66,
    "resnet56": 0.85,
    "resnet110": 1.73,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    """Oracle: He et al. 2016 and torchvision."""
    with torch.device("meta"):
        model = models.build(name, classes=10 if name in IN_MILLIONS else 1000)
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[name]
    if name in IN_MILLIONS:
        assert round(count / 1e6, 2) == IN_MILLIONS[name]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("digits_cnn", (2, 1, 8, 8)),
        ("resnet20", (2, 3, 32, 32)),
        ("mobilenet_small", (2, 3, 32, 32)),
        ("vit_small", (2, 3, 32, 32)),
        ("airbench94", (2, 3, 32, 32)),
        ("resnet18", (2, 3, 64, 64)),
        ("resnet50", (2, 3, 64, 64)),
    ],
)
def test_images_become_class_scores_and_every_parameter_gets_a_gradient(name, shape):
    model = models.build(name, classes=7, channels=shape[1])
    scores = model(torch.randn(shape))
    assert scores.shape == (2, 7)
    scores.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution():
    block = models.build("resnet50", classes=10).layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_option_a_subsamples_and_adds_zero_channels():
    x = torch.randn(2, 3, 4, 4)
    y = PadShortcut(3, 5, 2)(x)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert not y[:, 3:].any()


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="model=resnet21 is unknown; try one of digits_cnn, mobilenet_small"
    ):
        models.build("resnet21", classes=10)
