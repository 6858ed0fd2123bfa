"""Sources of tensors, one standing on another."""

import torch

from drawloom.components.model_state.tensor_source import AsType, InMemory, Renamed, TensorKind

SOURCE = InMemory({"a": torch.ones(2, 3, requires_grad=True), "b": torch.tensor([1, 2])})


def test_in_memory_gives_detached_tensors() -> None:
    """Shapes and dtypes are those of the tensors, and no gradient hangs on what is given."""
    assert SOURCE.kinds() == {"a": TensorKind((2, 3), torch.float32), "b": TensorKind((2,), torch.int64)}
    assert not SOURCE.tensor("a").requires_grad
    assert (SOURCE.kinds()["a"].bytes, SOURCE.kinds()["b"].bytes) == (24, 16)


def test_renamed_gives_only_what_has_a_new_name() -> None:
    """Names are new, numbers are old, and the rest is left out."""
    renamed = Renamed(SOURCE, {"c": "a", "lost": "nowhere"})
    assert list(renamed.kinds()) == ["c"]
    assert torch.equal(renamed.tensor("c"), torch.ones(2, 3))


def test_as_type_leaves_whole_numbers_alone() -> None:
    """Floating-point tensors change their dtype, and say so before they are read; others stay."""
    half = AsType(SOURCE, torch.bfloat16)
    assert {name: kind.dtype for name, kind in half.kinds().items()} == {"a": torch.bfloat16, "b": torch.int64}
    assert (half.tensor("a").dtype, half.tensor("b").dtype) == (torch.bfloat16, torch.int64)


def test_sources_stand_on_one_another() -> None:
    """A renamed source in another dtype is both."""
    both = AsType(Renamed(SOURCE, {"c": "a"}), torch.float16)
    assert both.kinds() == {"c": TensorKind((2, 3), torch.float16)}
