"""Models with buffers of any dtype are trained and stored; other kinds of tensors are rejected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.comm.messages import check_sendable

DTYPES = [
    *(torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8, torch.float16),
]
OTHERS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "seen is torch.sparse_coo, but must be a plain"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), "seen is torch.sparse_csr, but must be a plain"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"seen is quantized, but must be a plain tensor; use its dequantize\(\)",
    ),
    "conjugate": (lambda: torch.tensor([1j]).conj(), "seen is a conjugate view, but must be"),
    "lazy": (nn.UninitializedBuffer, "seen has no shape yet; call the model before"),
}


def trainer(kind, comm, buffer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_buffer("seen", buffer)
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [mpikfac.KFAC, mpikfac.FirstOrderTrainer])
def test_a_buffer_of_any_dtype_is_stored_and_comes_back(comm, tmp_path, kind, dtype):
    """Oracle: the numbers of the buffer, in a trainer that began with others."""
    numbers = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).to(dtype)
    first, second = (trainer(kind, comm, buffer) for buffer in (numbers, torch.zeros_like(numbers)))
    first.model(torch.ones(5, 4)).sum().backward()
    first.step()
    path = mpikfac.save_checkpoint(comm, tmp_path, first.state_dict(), 1)
    second.load_state_dict(mpikfac.load_checkpoint(comm, path))
    assert second.model.seen.dtype == dtype
    assert str(second.model.seen) == str(numbers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", [mpikfac.KFAC, mpikfac.FirstOrderTrainer])
def test_other_forms_of_tensors_are_refused_by_name_when_the_trainer_is_made(comm, kind, name):
    """Oracle: the messages, written out."""
    buffer, message = OTHERS[name]
    with pytest.raises(ValueError, match=message):
        trainer(kind, comm, buffer())


def test_a_message_has_at_most_as_many_elements_as_an_int_counts():
    """Oracle: the largest C int, which MPI counts with."""
    most = torch.iinfo(torch.int32).max
    check_sendable("gather", most)
    with pytest.raises(ValueError, match=f"'gather' has {most + 1} .* at most {most}"):
        check_sendable("gather", most + 1)
