"""Sources of tensors, and the bytes of tensors."""

import pytest
import torch

from drawloom.components.storage.safetensors.writer import DTYPES
from drawloom.components.storage.tensor_source import (
    TensorSpec,
    allocate_tensor_and_byte_view,
    view_as_tensor,
    view_bytes,
)
from support.tensor_sources import InMemoryTensors

SOURCE = InMemoryTensors({"a": torch.ones(2, 3, requires_grad=True), "b": torch.tensor([1, 2])})


def test_in_memory_gives_detached_tensors() -> None:
    """Shapes and dtypes equal the tensors', and the returned tensors have no gradient."""
    assert SOURCE.specs() == {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((2,), torch.int64)}
    assert not SOURCE.tensor("a").requires_grad
    assert (SOURCE.specs()["a"].bytes, SOURCE.specs()["b"].bytes) == (24, 16)


def test_memory_that_another_object_holds_is_not_owned() -> None:
    """Tensors of a source in memory are not owned by the reader."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_bytes_of_a_tensor_give_the_tensor_back(dtype: torch.dtype) -> None:
    """A tensor's bytes, in any dtype, make the same tensor again."""
    tensor = torch.randint(0, 2, (3, 4)).to(dtype)
    memory = torch.frombuffer(bytearray(view_bytes(tensor)), dtype=torch.uint8)
    again = view_as_tensor(memory, TensorSpec((3, 4), dtype))
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_scalars_and_empty_tensors_have_their_bytes(shape: tuple[int, ...]) -> None:
    """Numbers without a dimension, and tensors without a number, have their bytes."""
    tensor = torch.ones(shape)
    assert len(view_bytes(tensor)) == 4 * tensor.numel()
    filled, memory = allocate_tensor_and_byte_view(TensorSpec(shape, torch.float32))
    memory[:] = view_bytes(tensor)
    assert torch.equal(filled, tensor)


def test_strided_tensors_are_written_row_by_row() -> None:
    """A tensor with another memory layout is written in row-major order; one with a gradient can be written."""
    tensor = torch.arange(6.0, requires_grad=True).view(2, 3).T
    assert bytes(view_bytes(tensor)) == bytes(view_bytes(torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])))
    turned = torch.view_as_complex(torch.ones(1, 2)).conj()
    assert bytes(view_bytes(turned)) == bytes(view_bytes(torch.tensor([1 - 1j], dtype=torch.complex64)))


def test_a_contiguous_cpu_tensor_is_not_copied() -> None:
    """The bytes of a contiguous tensor on the CPU are its own memory."""
    tensor = torch.zeros(3)
    view_bytes(tensor)[0:4] = view_bytes(torch.ones(1))
    assert tensor.tolist() == [1.0, 0.0, 0.0]
