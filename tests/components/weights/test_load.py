"""Filling modules from folders, and whether a folder's tensors fit a module's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drawloom.components.weights.load import fill_module
from drawloom.components.weights.mapper import chunk, identity, parallel, rename, sequential, stack, transpose, unstack
from drawloom.graph import UserError
from support.tensor_sources import InMemoryTensors
from support.weight_folders import fill_module_from_folder

MAPPER = rename({"model.a": "a", "model.b": "b"})


def folder_of(folder: Path, **tensors: Tensor) -> Path:
    """Return a folder with tensors `model.NAME`."""
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def module_of(**parameters: Tensor) -> Any:
    """Return a module with these parameters."""
    module = nn.Module()
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return module


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_fills_in_place(tmp_path: Path) -> None:
    """Real parameters keep their memory and dtype, and get their numbers."""
    module = module_of(a=torch.zeros(2, 2), b=torch.zeros(3, dtype=torch.float64))
    places = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    a = torch.randn(2, 2).bfloat16()
    fill_module_from_folder(folder_of(tmp_path, a=a, b=torch.arange(3.0)), module, MAPPER)
    assert torch.equal(module.a, a.float())
    assert torch.equal(module.b, torch.arange(3, dtype=torch.float64))
    assert places == {name: parameter.data_ptr() for name, parameter in module.named_parameters()}


def test_makes_meta_parameters_real(tmp_path: Path) -> None:
    """Parameters on the meta device become real with their own dtype, frozen ones stay frozen."""
    module = module_of(a=meta(2, 2, dtype=torch.bfloat16), b=meta(3))
    module.b.requires_grad_(False)
    a = torch.randn(2, 2)
    fill_module_from_folder(folder_of(tmp_path, a=a, b=torch.arange(3.0)), module, MAPPER)
    assert torch.equal(module.a, a.bfloat16())
    assert torch.equal(module.b, torch.arange(3.0))
    assert [parameter.requires_grad for parameter in module.parameters()] == [True, False]


def test_tied_meta_parameters_stay_tied(tmp_path: Path) -> None:
    """A parameter of two modules is still one parameter when it is real."""
    module: Any = nn.Module()
    module.one, module.other = nn.Linear(2, 2, bias=False, device="meta"), nn.Linear(2, 2, bias=False, device="meta")
    module.other.weight = module.one.weight
    fill_module_from_folder(folder_of(tmp_path, w=torch.ones(2, 2)), module, rename({"model.w": "one.weight"}))
    assert module.other.weight is module.one.weight
    assert torch.equal(module.other.weight, torch.ones(2, 2))


def test_meta_parameters_do_not_keep_the_whole_tensor() -> None:
    """A parameter made from a tensor's part has memory for its own size, laid out row by row."""
    module = module_of(a=meta(2, 3), b=meta(2, 3), c=meta(4, 5))
    mapper = parallel(chunk("ab", ["a", "b"]), transpose("c", 0, 1))
    fill_module(
        InMemoryTensors({"ab": torch.arange(12.0).view(4, 3), "c": torch.arange(20.0).view(5, 4)}), module, mapper
    )
    for parameter in module.parameters():
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert torch.equal(torch.cat([module.a, module.b]), torch.arange(12.0).view(4, 3))
    assert torch.equal(module.c, torch.arange(20.0).view(5, 4).T)


def test_loading_copies_the_source() -> None:
    """Training changes the module, but no source tensor."""
    tensors = {"a": torch.ones(2, 2)}
    module = module_of(a=meta(2, 2))
    fill_module(InMemoryTensors(tensors), module, identity("a"))
    with torch.no_grad():
        module.a.add_(1)
    assert torch.equal(tensors["a"], torch.ones(2, 2))


def test_a_part_of_a_model_is_filled(tmp_path: Path) -> None:
    """A stage reads its own tensors from a folder with the whole model, also one tensor from a group."""
    module = module_of(b=torch.zeros(3))
    fill_module_from_folder(folder_of(tmp_path, a=torch.ones(2), b=torch.ones(3)), module, MAPPER)
    assert torch.equal(module.b, torch.ones(3))
    module = module_of(b=torch.zeros(3))
    fill_module(InMemoryTensors({"ab": torch.arange(6.0).view(2, 3)}), module, unstack("ab", ["a", "b"]))
    assert torch.equal(module.b, torch.tensor([3.0, 4.0, 5.0]))


def test_all_mismatches_of_a_folder_are_reported_at_once(tmp_path: Path) -> None:
    """Missing, unexpected, misshapen and nameless tensors are one message, and nothing is filled."""
    mapper = rename({f"model.{name}": name for name in "abcd"})
    module = module_of(a=torch.zeros(2, 2), b=torch.zeros(3), adapter=torch.zeros(1))
    folder = folder_of(tmp_path, a=torch.ones(2, 3), b=torch.ones(3), x=torch.ones(1), y=torch.ones(1))
    with pytest.raises(UserError) as caught:
        fill_module_from_folder(folder, module, mapper)
    for part in (
        "parameters without a tensor in the folder: adapter",
        "missing model.c, model.d",
        "unexpected model.x, model.y",
        "wrong shape model.a (2, 3) for (2, 2)",
    ):
        assert part in str(caught.value)
    assert not module.b.any()


def test_a_group_that_cannot_be_converted_is_reported(tmp_path: Path) -> None:
    """Tensors that do not fit together are named before anything is read."""
    folder = folder_of(tmp_path, a=torch.ones(2), b=torch.ones(3))
    with pytest.raises(UserError, match=r"ab can't be made of model\.a, model\.b: stack expects each tensor"):
        fill_module_from_folder(folder, module_of(ab=torch.zeros(2, 2)), stack(["model.a", "model.b"], "ab"))


def test_a_tied_copy_is_fine(tmp_path: Path) -> None:
    """A folder may hold a tied head beside the embedding, if it is the same; a different one is unexpected."""
    embedding = torch.randn(4, 2)
    for head, fits in ((embedding.clone(), True), (embedding + 1, False)):
        folder = folder_of(tmp_path, a=embedding, b=torch.ones(4, 2), head=head)
        module = module_of(a=torch.zeros(4, 2), b=torch.zeros(4, 2))
        if fits:
            fill_module_from_folder(folder, module, MAPPER)
            assert torch.equal(module.a, embedding)
        else:
            with pytest.raises(UserError, match=r"unexpected model\.head"):
                fill_module_from_folder(folder, module, MAPPER)


def test_computed_buffers_of_old_folders_are_ignored(tmp_path: Path) -> None:
    """Rotary frequencies in Llama's first folders follow from the config."""
    tensors = {
        "model.a": torch.ones(2),
        "model.b": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    module = module_of(a=torch.zeros(2), b=torch.zeros(3))
    fill_module_from_folder(tmp_path, module, MAPPER)
    assert bool(module.a.all() and module.b.all())


def test_experts_of_a_folder_are_stacked_and_transposed(tmp_path: Path) -> None:
    """Experts stored one by one in a folder become one parameter, transposed."""
    experts = [torch.randn(3, 2) for _ in range(4)]
    names = [f"experts.{number}.up.weight" for number in range(4)]
    save_file(dict(zip(names, experts, strict=True)), tmp_path / "model.safetensors")
    module = module_of(up=meta(4, 2, 3))
    fill_module_from_folder(tmp_path, module, sequential(stack(names, "up"), transpose("up", 1, 2)))
    assert torch.equal(module.up, torch.stack([expert.T for expert in experts]))
