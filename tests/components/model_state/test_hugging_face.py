"""Whether a folder's tensors fit a model's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drawloom.components.model_state.hugging_face import as_hugging_face, load_parameters
from drawloom.graph import UserError

NAMES = {"a": "model.a", "b": "model.b"}


def folder_of(folder: Path, **tensors: torch.Tensor) -> Path:
    """A folder with tensors `model.NAME`."""
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_fills_in_place(tmp_path: Path) -> None:
    """Each tensor gets its numbers, in its own dtype; parameters that need gradients can be filled."""
    wanted = {"a": torch.nn.Parameter(torch.zeros(2, 2)), "b": torch.zeros(3, dtype=torch.float64)}
    load_parameters(folder_of(tmp_path, a=torch.randn(2, 2).bfloat16(), b=torch.arange(3.0)), wanted, NAMES)
    assert wanted["a"].dtype == torch.float32
    assert wanted["a"].detach().abs().min() > 0
    assert torch.equal(wanted["b"], torch.arange(3, dtype=torch.float64))


def test_fills_a_part(tmp_path: Path) -> None:
    """A stage asks for its own tensors of a folder that holds the whole model."""
    wanted = {"b": torch.zeros(3)}
    load_parameters(folder_of(tmp_path, a=torch.ones(2), b=torch.ones(3)), wanted, NAMES)
    assert torch.equal(wanted["b"], torch.ones(3))


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    """Missing, unexpected, misshapen and nameless tensors are one message, and nothing is filled."""
    names = NAMES | {"c": "model.c", "d": "model.d"}
    wanted = {"a": torch.zeros(2, 2), "b": torch.zeros(3), "adapter": torch.zeros(1)}
    folder = folder_of(tmp_path, a=torch.ones(2, 3), b=torch.ones(3), x=torch.ones(1), y=torch.ones(1))
    with pytest.raises(UserError) as caught:
        load_parameters(folder, wanted, names)
    for part in (
        "no name there for adapter",
        "missing model.c, model.d",
        "unexpected model.x, model.y",
        "wrong shape model.a (2, 3) for (2, 2)",
    ):
        assert part in str(caught.value)
    assert not wanted["b"].any()


def test_a_tied_copy_is_fine(tmp_path: Path) -> None:
    """A folder may hold a tied head beside the embedding, if it is the same; a different one is unexpected."""
    embedding = torch.randn(4, 2)
    for head, fits in ((embedding.clone(), True), (embedding + 1, False)):
        folder = folder_of(tmp_path, a=embedding, b=torch.ones(4, 2), head=head)
        wanted = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}
        if fits:
            load_parameters(folder, wanted, NAMES)
            assert torch.equal(wanted["a"], embedding)
        else:
            with pytest.raises(UserError, match=r"unexpected model\.head"):
                load_parameters(folder, wanted, NAMES)


def test_writes_the_whole_model_or_nothing() -> None:
    """Tensors to write must be those of the model, each one and no other."""
    with pytest.raises(UserError, match="missing b; no name there for adapter"):
        as_hugging_face({"a": torch.ones(1), "adapter": torch.ones(1)}, NAMES, None)


def test_writes_under_their_names() -> None:
    """Names are Hugging Face's, in the order of the model; the dtype is as asked."""
    tensors = {"b": torch.ones(1), "a": torch.zeros(1)}
    source = as_hugging_face(tensors, NAMES, torch.float16)
    assert list(source.kinds()) == ["model.a", "model.b"]
    assert source.tensor("model.b").dtype == torch.float16
    assert as_hugging_face(tensors, NAMES, None).tensor("model.b").dtype == torch.float32
