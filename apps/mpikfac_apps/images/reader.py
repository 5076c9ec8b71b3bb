"""Read images by index, decode them in advance, and replace those that cannot be decoded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.images.decoders import REST, Decoders
from mpikfac_apps.images.listing import Images
from mpikfac_apps.images.worker import Fault

Draw = tuple[int, ...]

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class DecodeRequest:
    """A request for images that are being decoded.

    Attributes:
        images: the list of images.
        numbers: the positions of the images in the list.
        draws: for each image, the seed of a random crop; None for central crops.
        slot: the memory slot that the images are decoded into.
        ticket: the ticket of the request in `Decoders`.
    """

    images: Images
    numbers: Sequence[int]
    draws: Sequence[Draw] | None
    slot: int
    ticket: int


class ImageReader:
    """Decode images, and replace a broken image with the next image of its class.

    All ranks replace a broken image in the same way.

    Args:
        size: the side length in pixels of a decoded image.
        room: the maximum number of images in a request.
        workers: the number of decoding processes; with 0, images are decoded in this process, when
            a result is requested.
        most: the maximum number of different broken images; more raise an error.
    """

    def __init__(self, size: int, room: int, workers: int, most: int) -> None:
        self.size, self.room, self.most = size, room, most
        self._decoders = Decoders(workers, size, room)
        self._broken: dict[str, str] = {}  # reasons by image
        self._logged: set[str] = set()

    def begin(
        self, images: Images, numbers: Sequence[int], draws: Sequence[Draw] | None, slot: int
    ) -> DecodeRequest:
        """Start decoding images, and return immediately."""
        jobs = [
            (position, images.place(number), draws[position] if draws else None)
            for position, number in enumerate(numbers)
        ]
        return DecodeRequest(images, numbers, draws, slot, self._decoders.begin(slot, jobs))

    def result(self, request: DecodeRequest, device: torch.device) -> Tensor:
        """Return the images of a request, bytes `[n, 3, h, w]` in channels-last memory format.

        Raises:
            UserError: more images are broken than the options allow, or all images of a class are.
        """
        pixels = self._decoders.pixels(request.slot, len(request.numbers))
        for fault in self._decoders.faults(request.ticket):
            pixels[fault[0]] = self._in_place_of(fault, request)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device, copy=True)

    def read(
        self, images: Images, numbers: Sequence[int], size: int, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield images of a list, `size` at a time, while the next ones are decoded.

        Raises:
            UserError: see `result`.
        """
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        ahead = self.begin(images, parts[0], None, REST) if parts else None
        for following in [*parts[1:], None]:
            if ahead is None:
                return
            batch = self.result(ahead, device)
            ahead = None if following is None else self.begin(images, following, None, REST)
            yield batch

    def _in_place_of(self, fault: Fault, request: DecodeRequest) -> np.ndarray:
        """Return the pixels of the next image of the same class that can be decoded."""
        from mpikfac_apps.images.decoding import Broken, decoded

        position, reason = fault
        images = request.images
        first = number = request.numbers[position]
        while True:
            self._note(str(images.place(number)), reason)
            number = images.following(number)
            if number == first:
                raise mpikfac.UserError(
                    f"{images.place(first)}: all images of the class are broken"
                )
            try:
                draw = request.draws[position] if request.draws else None
                return decoded(images.place(number), self.size, draw)
            except Broken as error:
                reason = str(error)

    def _note(self, image: str, reason: str) -> None:
        self._broken[image] = reason
        self._check(image)

    def _check(self, image: str) -> None:
        if len(self._broken) > self.most:
            raise mpikfac.UserError(
                f"{image} cannot be decoded: {self._broken[image]}; repair or delete the file, or "
                f"raise data.max_broken_images (now {self.most})"
            )

    def share_broken(self, comm: mpikfac.comm.Comm) -> None:
        """Exchange lists of broken images between ranks, and log each image once.

        Collective over: comm, or none if no broken image is allowed.

        Raises:
            UserError: the ranks together have found more broken images than the options allow.
        """
        if not self.most:
            return
        for broken in comm.allgather(self._broken):
            self._broken |= broken
        for image in sorted(self._broken.keys() - self._logged):
            self._logged.add(image)
            if comm.rank == 0:
                reason = self._broken[image]
                log.warning("%s cannot be decoded, and is replaced: %s", image, reason)
        if self._broken:
            self._check(max(self._broken))

    def close(self) -> None:
        """End the decoding processes."""
        self._decoders.close()
