"""Build torchvision's Mask R-CNNs: a small one for drawn shapes, and the standard one."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

HEADS = "roi_heads"  # the module whose inputs are boxes, not images


def build(name: str, classes: int, size: int) -> nn.Module:
    """Return a Mask R-CNN with random initial weights.

    Args:
        name: a name in `NETWORKS`.
        classes: the number of classes, with the background as class 0.
        size: the height and width of images in pixels.

    Raises:
        ValueError: torchvision is not installed, or its build does not match torch.
    """
    return NETWORKS[name](torchvision(), classes, size)


def torchvision() -> Any:
    """Import and return torchvision, including its detection module.

    Raises:
        ValueError: torchvision is not installed, or does not match torch.
    """
    try:
        importlib.import_module("torchvision.models.detection")
        return importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        about = " ".join(str(error).split())
        raise ValueError(
            f"detection needs a torchvision version that matches torch: {about}; in a separate "
            f"environment, run pip install 'mpikfac[apps,detection]'; see "
            f"docs/extensions/detection.md"
        ) from error


def small(vision: Any, classes: int, size: int) -> nn.Module:
    """Return a Mask R-CNN with 0.2 million weights for images of a few large shapes."""
    models, channels, units = vision.models.detection, 32, 64
    anchors = models.rpn.AnchorGenerator(
        sizes=((size // 4,), (size // 2,)), aspect_ratios=((1.0,), (1.0,))
    )

    def pool(side: int) -> nn.Module:
        levels = {"featmap_names": LEVELS, "sampling_ratio": 2, "canonical_scale": size}
        return vision.ops.MultiScaleRoIAlign(output_size=side, **levels)

    return models.MaskRCNN(
        Pyramid(vision, channels),
        min_size=size,
        max_size=size,
        image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_roi_pool=pool(5),
        box_head=models.faster_rcnn.TwoMLPHead(channels * 5 * 5, units),
        box_predictor=models.faster_rcnn.FastRCNNPredictor(units, classes),
        box_batch_size_per_image=32,
        box_detections_per_img=20,
        mask_roi_pool=pool(14),
        mask_head=models.mask_rcnn.MaskRCNNHeads(channels, (channels,), 1),
        mask_predictor=models.mask_rcnn.MaskRCNNPredictor(channels, channels, classes),
    )


LEVELS = ["fine", "coarse"]


class Pyramid(nn.Module):
    """Four convolutions, and a feature pyramid at 1/4 and 1/8 of the image's resolution.

    Attributes:
        out_channels: the number of channels at both levels; torchvision reads it.
    """

    def __init__(self, vision: Any, channels: int) -> None:
        super().__init__()
        self.out_channels = channels
        relu = nn.ReLU(inplace=True)
        self.fine = nn.Sequential(_halving(3, 16), relu, _halving(16, 32), relu)
        self.coarse = nn.Sequential(_halving(32, 64), relu, nn.Conv2d(64, 64, 3, padding=1), relu)
        self.pyramid = vision.ops.FeaturePyramidNetwork([32, 64], channels)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        fine = self.fine(images)
        return self.pyramid(OrderedDict(zip(LEVELS, [fine, self.coarse(fine)])))


def _halving(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)


def resnet50(vision: Any, classes: int, size: int) -> nn.Module:
    """Return torchvision's Mask R-CNN with a ResNet-50 and a feature pyramid."""
    none = {"weights": None, "weights_backbone": None}
    sizes = {"min_size": size, "max_size": size}
    return vision.models.detection.maskrcnn_resnet50_fpn(**none, **sizes, num_classes=classes)


NETWORKS: dict[str, Callable[[Any, int, int], nn.Module]] = {"small": small, "resnet50": resnet50}
