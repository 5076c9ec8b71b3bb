"""Data sets by torchvision's names, made of small digits: 1,500 to train, 297 to test."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac_apps.problems import datasets

TRAINED = 1500


class MNIST(torch.utils.data.Dataset):
    """Digits of 8x8 pixels, drawn at `channels` x `size` x `size`; grey values are 0 to 1."""

    channels, size = 1, 28

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Tensor], Tensor] = lambda image: image,
        download: bool = False,
    ) -> None:
        digits = datasets.digits()
        images = torch.cat([digits.train_images, digits.test_images]) / digits.white
        labels = torch.cat([digits.train_labels, digits.test_labels])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        chosen = order[:TRAINED] if train else order[TRAINED:]
        images = F.interpolate(images[chosen], size=(self.size, self.size), mode="bilinear")
        self.images = images.expand(-1, self.channels, -1, -1)
        self.labels = labels[chosen].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


class CIFAR10(MNIST):
    """The digits in the form of CIFAR-10."""

    channels, size = 3, 32
