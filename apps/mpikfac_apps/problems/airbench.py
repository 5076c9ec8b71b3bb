"""The network of airbench94 [Jordan 2024]: eight layers for CIFAR-10, without shortcuts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEEN = 1000  # the number of training images from which the whitening is computed
EPSILON = 5e-4  # added to eigenvalues, to keep filters finite where patches have no variance
BIAS_EPOCHS = 3  # epochs in which the bias of the first layer is trained


def dirac(conv: nn.Conv2d) -> None:
    """Initialise the first `in_channels` filters to the identity; others keep initial values."""
    nn.init.dirac_(conv.weight[: conv.in_channels])


def group(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3x3 convolutions, the first followed by max pooling that halves the image size."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        shift(outputs),
        nn.GELU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        shift(outputs),
        nn.GELU(),
    )


def shift(channels: int) -> nn.BatchNorm2d:
    """Return a batch normalisation whose scale is frozen at 1; only its shift is trained."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


class Airbench(nn.Module):
    """A frozen convolution that whitens patches, three groups of convolutions, and a linear layer.

    `whiten` computes the frozen weights from training images.

    Args:
        widths: the number of channels of each group.
    """

    def __init__(
        self, classes: int, channels: int, widths: tuple[int, int, int] = (64, 256, 256)
    ) -> None:
        super().__init__()
        inputs = 8 * channels  # 4 * channels eigenvectors of 2x2 patches, with both signs
        self.whitening = nn.Conv2d(channels, inputs, 2)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.get_parameter("bias"))
        self.groups = nn.Sequential(*map(group, (inputs, *widths), widths))
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whitening(x)))
        return self.head(F.max_pool2d(x, 3).flatten(1)) / 9

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the frozen filters so that they whiten the 2x2 patches of the images.

        The filters are the eigenvectors of the patches' covariance, divided by the square roots of
        the eigenvalues, and the negatives of these vectors.

        Args:
            images: `[n, channels, h, w]`, as the network receives them.
        """
        patches = F.unfold(images, 2).movedim(1, 0).flatten(1).double()
        values, vectors = torch.linalg.eigh(torch.cov(patches))
        filters = (vectors / (values.clamp(min=0) + EPSILON).sqrt()).T
        weight = self.whitening.weight
        weight.copy_(torch.cat([filters, -filters]).view(weight.shape))

    def begin_epoch(self, epoch: int) -> None:
        """Freeze the bias of the first layer after three epochs; `epoch` counts from 0."""
        self.whitening.get_parameter("bias").requires_grad_(epoch < BIAS_EPOCHS)
