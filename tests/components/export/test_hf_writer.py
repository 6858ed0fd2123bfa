"""An exported folder, read by transformers and by us."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.export.hf_writer import read_exported_step, write_hugging_face_folder
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.stages import Stage
from drawloom.components.ports.weights import STATE
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import UserError
from support.doubles import PlainStages
from support.processes import run_ranks
from support.qwen3 import dense, logits_of, one_document, sparse, whole
from support.weight_folders import fill_module_from_folder


@attrs.frozen
class FakeStages(PlainStages):
    """Stages of given modules."""

    modules: list[nn.Module]

    @property
    def local(self) -> list[Stage]:
        nowhere = LayerRange(0, 0, False, False)
        return [Stage(number, len(self.modules), nowhere, module) for number, module in enumerate(self.modules)]


@attrs.frozen
class FakeTokenizer:
    """Writes one file."""

    eos_id: int = 5

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


both = pytest.mark.parametrize("make", [dense, sparse], ids=["dense", "sparse"])
Make = Callable[..., DecoderBuilder]


@both
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("max_shard", [2**30, 5000], ids=["one file", "several"])
def test_transformers_loads_it_as_is(tmp_path: Path, tied: bool, max_shard: int, make: Make) -> None:
    """from_pretrained reads every tensor of the folder, misses none, and its model has the same logits."""
    model = make(tie_word_embeddings=tied)
    module = whole(model)
    write_hugging_face_folder(tmp_path / "export", model, FakeStages([module]), max_shard=max_shard)
    theirs, report = load_in_transformers(tmp_path / "export")
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    tokens = torch.randint(29, (2, 11))
    torch.testing.assert_close(
        theirs(tokens).logits, logits_of(module, tokens, one_document(2, 11)), atol=1e-5, rtol=1e-5
    )
    files = len(list((tmp_path / "export").glob("*.safetensors")))
    assert files == 1 if max_shard == 2**30 else files > 2


@both
@pytest.mark.parametrize("max_shard", [2**30, 5000], ids=["one file", "several"])
def test_read_back_bit_by_bit(tmp_path: Path, max_shard: int, make: Make) -> None:
    """Reading an export gives the written tensors bit by bit, and its config the same model."""
    model = make(tie_word_embeddings=True)
    module = whole(model)
    write_hugging_face_folder(tmp_path / "export", model, FakeStages([module]), max_shard=max_shard)
    again = type(model)(kernels=model.kernels, config=tmp_path / "export")
    assert again.architecture == model.architecture
    read = whole(again)
    fill_module_from_folder(tmp_path / "export", read, again.hugging_face_mapper().inverse())
    written = dict(module.named_parameters())
    assert all(torch.equal(parameter, written[name]) for name, parameter in read.named_parameters())


@both
def test_a_folder_saved_by_transformers_is_read(tmp_path: Path, make: Make) -> None:
    """A model saved by transformers computes the same here."""
    for tied in (False, True):
        model = make(tie_word_embeddings=tied)
        write_hugging_face_folder(tmp_path / f"first{tied}", model, FakeStages([whole(model)]))
        theirs, _ = load_in_transformers(tmp_path / f"first{tied}")
        theirs.save_pretrained(tmp_path / f"second{tied}", max_shard_size="5KB")
        again = type(model)(kernels=model.kernels, config=tmp_path / f"second{tied}")
        module = whole(again)
        fill_module_from_folder(tmp_path / f"second{tied}", module, again.hugging_face_mapper().inverse())
        tokens = torch.randint(29, (1, 6))
        torch.testing.assert_close(
            logits_of(module, tokens, one_document(1, 6)), theirs(tokens).logits, atol=1e-5, rtol=1e-5
        )


def test_an_export_can_have_another_dtype(tmp_path: Path) -> None:
    """An export as bfloat16 has rounded numbers, and its config states the dtype."""
    model = dense()
    module = whole(model)
    write_hugging_face_folder(tmp_path / "export", model, FakeStages([module]), dtype=torch.bfloat16)
    theirs, _ = load_in_transformers(tmp_path / "export")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.lm_head.weight, dict(module.named_parameters())["lm_head.weight"].bfloat16())


def test_stages_of_one_rank_are_joined(tmp_path: Path) -> None:
    """Two stages export as the whole does, a tied head's copy of the embedding included."""
    model = dense(tie_word_embeddings=True)
    module = whole(model)
    parts = [model.build(LayerRange(0, 1, True, False)), model.build(LayerRange(1, 2, False, True))]
    for part in parts:
        part.load_state_dict({name: module.state_dict()[name] for name in part.state_dict()})
    write_hugging_face_folder(tmp_path / "whole", model, FakeStages([module]))
    write_hugging_face_folder(tmp_path / "parts", model, FakeStages(parts))
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert first == second


def _stage_of_two(folder: Path, tied: bool, max_shard: int) -> None:
    """Export a layer from one of two ranks, together with the other's."""
    dist.init_process_group("gloo")
    world = TorchGroup("world", [0, 1], dist.group.WORLD, torch.device("cpu"))
    torch.manual_seed(0)
    model = dense(tie_word_embeddings=tied)
    complete = whole(model).state_dict()
    part = model.build(LayerRange(world.rank, world.rank + 1, world.rank == 0, world.rank == 1))
    part.load_state_dict({name: complete[name] for name in part.state_dict()})
    stages = FakeStages([part])
    write_hugging_face_folder(folder / "parts", model, stages, group=world, max_shard=max_shard)


@pytest.mark.parametrize(("tied", "max_shard"), [(True, 2**30), (False, 5000)])
def test_stages_of_several_ranks_are_joined(tmp_path: Path, tied: bool, max_shard: int) -> None:
    """
    Two ranks with a stage apiece write, into separate files, the tensors written by a single process, tied or not.
    """
    run_ranks(_stage_of_two, 2, tmp_path, tied, max_shard)
    torch.manual_seed(0)
    model = dense(tie_word_embeddings=tied)
    module = whole(model)
    write_hugging_face_folder(tmp_path / "whole", model, FakeStages([module]), max_shard=max_shard)
    expected = open_safetensors_folder(tmp_path / "whole")
    exported = open_safetensors_folder(tmp_path / "parts")
    assert exported.specs().keys() == expected.specs().keys()
    assert all(torch.equal(exported.tensor(name), expected.tensor(name)) for name in exported.specs())
    files = {file.path.name for file in exported.files.values()} | {"model.safetensors.index.json", "config.json"}
    assert {*os.listdir(tmp_path / "parts")} == files
    assert (tmp_path / "parts" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    theirs, report = load_in_transformers(tmp_path / "parts")
    assert not any(report.values()), report
    assert torch.equal(theirs.model.norm.weight, dict(module.named_parameters())["model.norm.weight"])


def load_in_transformers(folder: Path) -> Any:
    """Return the loaded model, and the missing and unexpected names."""
    from transformers import AutoModelForCausalLM  # takes seconds, which ranks can do without

    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)


def test_part_of_a_model_is_refused(tmp_path: Path) -> None:
    """Exporting a part of the model is an error listing the missing parameters, and nothing is written."""
    model = dense()
    stages = FakeStages([model.build(LayerRange(0, 2, True, False))])
    with pytest.raises(UserError, match=r"no rank has model\.norm\.weight, lm_head\.weight"):
        write_hugging_face_folder(tmp_path / "export", model, stages)
    assert os.listdir(tmp_path) == []


def test_tokenizer_goes_along(tmp_path: Path) -> None:
    """The tokenizer's files are in the folder, and its end of text in the config."""
    tokenizer: Any = FakeTokenizer()
    model = dense()
    write_hugging_face_folder(tmp_path / "export", model, FakeStages([whole(model)]), tokenizer)
    assert json.loads((tmp_path / "export" / "tokenizer.json").read_text()) == {}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["eos_token_id"] == 5


def test_a_pipe_in_an_export_says_no_step(tmp_path: Path) -> None:
    """The export of a stranger is made again where its step can't be read; nothing waits for a writer."""
    os.mkfifo(tmp_path / STATE)
    assert read_exported_step(tmp_path) is None


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    """When the tokenizer can't be saved, no folder appears."""

    class Broken:
        eos_id = 5

        def save(self, folder: Path) -> None:
            raise OSError("disk full")

    tokenizer: Any = Broken()
    model = dense()
    with pytest.raises(UserError, match="disk full"):
        write_hugging_face_folder(tmp_path / "export", model, FakeStages([whole(model)]), tokenizer)
    assert os.listdir(tmp_path) == []
