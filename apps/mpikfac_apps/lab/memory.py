"""Compare the planned memory of a rank with its measured memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

import mpikfac
from mpikfac_apps.text import brief_mib, listed

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FEW = 2  # images in the pass from which memory is planned; some networks drop a dimension of size 1
PEAK = "5"  # writing this text resets the peak of the resident set to its present size


class MemoryReport:
    """The growth of a rank's memory since the creation of this object.

    On a GPU, this is the memory of tensors; on a CPU, the resident set of the process.
    """

    def __init__(self, comm: mpikfac.comm.Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        if device.type == "cpu":
            with suppress(OSError):  # where the kernel has no such file, earlier peaks count, too
                RESET.write_text(PEAK)
        else:
            torch.accelerator.reset_peak_memory_stats()
        self._before = self._bytes("VmRSS")

    def show(self, planned: Mapping[str, Mapping[str, int]]) -> None:
        """Print, on rank 0, the planned and measured memory of the rank whose memory grew most.

        Collective over: comm.

        Args:
            planned: the planned bytes by phase of the program and by part.
        """
        before, peak = self._before, self._bytes("VmHWM")
        grown = None if before is None or peak is None else peak - before
        phases = [
            f"{phase} {brief_mib(sum(parts.values()))} "
            f"({', '.join(f'{part} {brief_mib(size)}' for part, size in parts.items())})"
            for phase, parts in planned.items()
        ]
        line = (
            f"memory of a rank, MiB: {_text(before)} in use before; planned "
            f"for {listed(phases)}; measured {_text(grown)}"
        )
        of_ranks = self._comm.allgather((grown or 0, line))
        if self._comm.rank == 0:
            print(max(of_ranks)[1], flush=True)

    def _bytes(self, kind: str) -> int | None:
        """Return the bytes in use ("VmRSS"), or the maximum so far ("VmHWM").

        Some sandboxes do not report these values; the result is then None.
        """
        if self._device.type == "cpu":
            with suppress(OSError):
                if found := re.search(rf"{kind}:\s*(\d+) kB", STATUS.read_text()):
                    return 1024 * int(found[1])
            return None
        peak = kind == "VmHWM"
        accelerator = torch.accelerator
        return accelerator.max_memory_allocated() if peak else accelerator.memory_allocated()


def _text(size: int | None) -> str:
    return "unknown" if size is None else brief_mib(size)
