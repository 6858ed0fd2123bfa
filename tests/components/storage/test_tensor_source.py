"""Sources of tensors, one standing on another."""

import torch

from drawloom.components.storage.tensor_source import AsType, InMemory, TensorSpec

SOURCE = InMemory({"a": torch.ones(2, 3, requires_grad=True), "b": torch.tensor([1, 2])})


def test_in_memory_gives_detached_tensors() -> None:
    """Shapes and dtypes are those of the tensors, and no gradient hangs on what is given."""
    assert SOURCE.kinds() == {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((2,), torch.int64)}
    assert not SOURCE.tensor("a").requires_grad
    assert (SOURCE.kinds()["a"].bytes, SOURCE.kinds()["b"].bytes) == (24, 16)


def test_as_type_leaves_whole_numbers_alone() -> None:
    """Floating-point tensors change their dtype, and say so before they are read; others stay."""
    half = AsType(SOURCE, torch.bfloat16)
    assert {name: kind.dtype for name, kind in half.kinds().items()} == {"a": torch.bfloat16, "b": torch.int64}
    assert (half.tensor("a").dtype, half.tensor("b").dtype) == (torch.bfloat16, torch.int64)


def test_sources_stand_on_one_another() -> None:
    """The dtype is that of the last one."""
    both = AsType(AsType(SOURCE, torch.bfloat16), torch.float16)
    assert both.kinds()["a"] == TensorSpec((2, 3), torch.float16)
    assert both.tensor("a").dtype == torch.float16


def test_what_others_hold_is_not_given_away() -> None:
    """Tensors in memory belong to whoever put them there, in whatever dtype they are asked for."""
    assert not SOURCE.owns_memory
    assert not AsType(SOURCE, torch.float16).owns_memory
