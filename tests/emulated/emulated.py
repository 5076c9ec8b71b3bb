"""Load the emulated device: tensors on "cuda" without a GPU, in a build of torch for CPUs.

The library `libdevice.so` beside this file comes from `python tests/emulated/build.py`. Python
loads this module first of all, by `sitecustomize.py`, in every process whose PYTHONPATH holds this
folder: torch asks once whether there is a device.

MPI reads and writes the device's memory, as a CUDA-aware MPI does: DLPack passes on the address
where the host finds the content.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libdevice.so")
_device = ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)
_device.emulated_content.restype = ctypes.c_void_p
_device.emulated_content.argtypes = [ctypes.c_void_p]
_device.emulated_random.restype = ctypes.POINTER(ctypes.c_uint64 * 2)
_Watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)

import torch  # noqa: E402


@contextmanager
def watched(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Call `tell(kind, name)` for each kernel ("kernel") and each wait of the host ("wait")."""
    function = _Watch(lambda kind, name: tell(kind.decode(), name.decode()))
    _device.emulated_watch(function)
    try:
        yield
    finally:
        _device.emulated_watch(_Watch())


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host with the memory of a contiguous tensor of the device."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    address = _device.emulated_content(tensor.data_ptr())
    buffer = (ctypes.c_byte * tensor.nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


_dlpack = torch.Tensor.__dlpack__


def _to_dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not self.is_cuda:
        return _dlpack(self, *args, **kwargs)
    if self.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if not self.is_contiguous():
        raise BufferError("MPI would read the elements of another tensor: not contiguous")
    return _dlpack(_content(self), *args, **kwargs)


_to = torch.Tensor.__dlpack_device__


def _on_host(self: torch.Tensor) -> Any:
    return (1, 0) if self.is_cuda else _to(self)


torch.Tensor.__dlpack__ = _to_dlpack  # type: ignore[method-assign]
torch.Tensor.__dlpack_device__ = _on_host  # type: ignore[method-assign]


def _begin() -> None:
    cuda._initialized = True


def _seed(seed: int) -> None:
    _device.emulated_random().contents[:] = (seed % 2**64, 0)


def _random_state(device: object = None) -> torch.Tensor:
    return torch.tensor([n - 2**63 for n in _device.emulated_random().contents]).view(torch.uint8)


def _set_random_state(state: torch.Tensor, device: object = None) -> None:
    _device.emulated_random().contents[:] = [n + 2**63 for n in state.view(torch.int64).tolist()]


cuda = torch.cuda
cuda._lazy_init = cuda.init = _begin
cuda.is_initialized = lambda: cuda._initialized
cuda.is_available = lambda: True
cuda.device_count = lambda: _device.emulated_devices()
cuda.is_current_stream_capturing = lambda: False
cuda.is_bf16_supported = lambda *choices: True
cuda.get_device_name = lambda device=None: "emulated device"
cuda.is_bf16_supported = lambda including_emulation=True: True
cuda.manual_seed_all = cuda.manual_seed = _seed
cuda.get_rng_state, cuda.set_rng_state = _random_state, _set_random_state
cuda._exchange_device = torch._C._accelerator_exchangeDevice
cuda._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice


_reduce = torch.Tensor.__reduce_ex__


def _reduced(self: torch.Tensor, protocol: int) -> Any:  # pickle cannot make storages here
    if not self.is_cuda:
        return _reduce(self, protocol)
    return torch.Tensor.to, (self.detach().cpu(), self.device)


torch.Tensor.__reduce_ex__ = _reduced  # type: ignore[method-assign]

_clone = torch.UntypedStorage.clone


def _cloned(self: torch.UntypedStorage) -> torch.UntypedStorage:  # for copy.deepcopy
    if self.device.type != "cuda":
        return _clone(self)
    whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (len(self),), (1,))
    return whole.clone().untyped_storage()


torch.UntypedStorage.clone = _cloned  # type: ignore[method-assign]
