"""Rows for new tokens beside the table of embedding and head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.auto import AutoModel
from drawloom.components.model.decoder.builder import DecoderModel
from drawloom.components.model.new_tokens import NewTokens, count_new_rows, find_new_tokens_fault
from drawloom.components.ports.model import LayerRange
from drawloom.graph import UserError
from drawloom.graph.project import Recipe
from support.adapted import OneStage
from support.qwen3 import cpu_kernels, dense, logits_of, losses_of, one_document, twin, whole
from support.weight_folders import fill_module_from_folder


class Ids:
    """A tokenizer with a given number of ids."""

    def __init__(self, count: int) -> None:
        self.vocab_size, self.eos_id = count, 0


def loaded(folder: Path, tokenizer: Any, new_tokens: NewTokens) -> tuple[DecoderModel, Any]:
    """Return the model of a folder with new tokens, and its module with the folder's weights."""
    model = AutoModel(kernels=cpu_kernels(), path=folder, tokenizer=tokenizer, new_tokens=new_tokens)
    module = model.build(LayerRange(0, 2, embedding=True, head=True))
    fill_module_from_folder(folder, module, model.hugging_face_mapper().inverse())
    return model, module


def base(folder: Path, tied: bool) -> dict[str, Any]:
    """Return the tensors in a folder whose model has 29 ids."""
    torch.manual_seed(0)
    model = dense(tie_word_embeddings=tied)
    write_hugging_face_folder(folder, model, OneStage(whole(model)))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_start_as_the_mean_of_the_folders_rows(tied: bool, tmp_path: Path) -> None:
    """Ids beyond the folder's rows start as their mean; all other rows are unchanged."""
    tensors = base(tmp_path / "base", tied)
    for tokens, first in ((31, 29), (30, 28), (27, 25)):  # all are beyond the table, one is, none is
        model, module = loaded(tmp_path / "base", Ids(tokens), tokens - first)
        assert model.vocab_size == max(29, tokens)
        table = tensors["model.embed_tokens.weight"]
        embedded = module.model.embed_tokens(torch.arange(model.vocab_size))
        assert torch.equal(embedded[:29], table)
        torch.testing.assert_close(embedded[29:], table[:first].mean(0).expand(tokens - 29 if tokens > 29 else 0, -1))
        assert module.model.embed_tokens.new_tokens.shape == (tokens - first, 24)
        assert tied or hasattr(module.lm_head, "new_tokens")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [32, 27])
@pytest.mark.parametrize("new", [3, {"audio": 2, "image": 1}], ids=["one split", "two splits"])
def test_the_export_is_one_table_that_computes_the_same(
    tied: bool, tokens: int, new: NewTokens, tmp_path: Path
) -> None:
    """The export has transformers' logits and our gradients by row; a second load has the same rows."""
    base(tmp_path / "base", tied)
    model, module = loaded(tmp_path / "base", Ids(tokens), new)
    layers = ("model.embed_tokens", *([] if tied else ["lm_head"]))
    for name in layers:
        for split in count_new_rows(new):
            torch.nn.init.normal_(module.get_submodule(name).get_parameter(split))
    write_hugging_face_folder(tmp_path / "export", model, OneStage(module))
    size = max(29, tokens)
    assert json.loads((tmp_path / "export/config.json").read_text())["vocab_size"] == size
    written = load_file(tmp_path / "export/model.safetensors")
    assert ("lm_head.weight" in written) != tied and written["model.embed_tokens.weight"].shape == (size, 24)
    plain = AutoModel(kernels=cpu_kernels(), path=tmp_path / "export")
    theirs = twin(plain, {name: torch.nn.Parameter(tensor) for name, tensor in written.items()})
    ids, targets = torch.randint(size, (2, 2, 9))
    logits = logits_of(module, ids, one_document(2, 9))
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    ours = losses_of(module, ids, one_document(2, 9), targets).sum()
    others = torch.nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.autograd.backward([ours, others])
    for name in layers:
        layer, wanted = module.get_submodule(name), theirs.get_submodule(name).weight.grad
        table, *splits = wanted[:tokens].split([tokens - 3, *count_new_rows(new).values()])
        for split, rows in zip(count_new_rows(new), splits, strict=True):
            torch.testing.assert_close(layer.get_parameter(split).grad, rows, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.weight.grad[: tokens - 3], table, rtol=1e-4, atol=1e-4)
    again, copy = loaded(tmp_path / "export", Ids(tokens), new)
    assert again.vocab_size == size
    for name in layers:
        for split in count_new_rows(new):
            assert torch.equal(
                copy.get_submodule(name).get_parameter(split), module.get_submodule(name).get_parameter(split)
            )


def test_one_of_several_splits_can_be_trained_alone(tmp_path: Path) -> None:
    """Its gradients do not depend on the gradients of other splits, in embedding and head."""
    base(tmp_path / "base", False)
    grads = []
    for alone in (False, True):
        _, module = loaded(tmp_path / "base", Ids(32), {"audio": 2, "image": 1})
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not alone or name.endswith(".audio"))
        ids = torch.arange(32).view(2, 16)
        losses_of(module, ids, one_document(2, 16), ids.flip(0)).sum().backward()
        actual = {name: part.grad for name, part in module.named_parameters() if part.grad is not None}
        assert not alone or actual.keys() == {"model.embed_tokens.audio", "lm_head.audio"}
        grads.append(actual)
    for name, grad in grads[1].items():
        torch.testing.assert_close(grad, grads[0][name])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-1, "-1 is not from 0"),
        ({"weight": 2}, "'weight' can't be the name of a parameter of embedding and head; write another"),
        ({"a b": 2}, "'a b' can't be the name"),
        ({"audio": 1, "forward": 2}, "'forward' can't be the name"),
        ({"split": 1}, "'split' can't be the name"),
        ({"image": 0}, "image = 0 is not from 1"),
    ],
)
def test_names_and_numbers_of_splits_are_checked(value: Any, why: str) -> None:
    """A name must be free in both layers, and a split must have a row."""
    assert why in str(find_new_tokens_fault(value))
    assert find_new_tokens_fault({"audio": 2, "image": 1}) is None and find_new_tokens_fault(0) is None


def test_ids_without_rows_are_refused(tmp_path: Path) -> None:
    """Ids beyond table and new tokens, and a split that uses all rows, are refused; tensors still have to fit."""
    tensors = base(tmp_path / "base", True)
    with pytest.raises(UserError, match="has 33 ids, but the model's vocabulary only 29; write new_tokens = 4 for"):
        loaded(tmp_path / "base", Ids(33), 3)
    with pytest.raises(UserError, match="new_tokens: 20 of the tokenizer's 20 ids can't all be added ones"):
        loaded(tmp_path / "base", Ids(20), 20)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:28].clone()
    save_file(tensors, tmp_path / "base/model.safetensors")
    with pytest.raises(UserError, match=r"wrong shape model.embed_tokens.weight \(28, 24\) for \(29, 24\)"):
        loaded(tmp_path / "base", Ids(31), 2)


def test_tensor_ranks_are_refused(tmp_path: Path) -> None:
    """Tensor-parallel ranks are refused before a run starts, because they would split the rows."""
    base(tmp_path / "base", True)
    words = (f"vars.base={tmp_path / 'base'}", "model.new_tokens=2", "mesh.tensor=2")
    problems = [str(problem) for problem in Recipe.load("finetune", *words).graph.problems]
    assert any("the rows of new tokens can't be shared" in problem for problem in problems), problems
