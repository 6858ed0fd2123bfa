"""Exporting at the end of a run."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.export.hugging_face import HuggingFaceExport
from drawloom.components.model.auto import FAMILIES, AutoModel
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.pipeline import Scorer
from drawloom.components.ports.run import FinalTask
from drawloom.components.ports.stages import Stage
from drawloom.graph.types.port_match import find_mismatches
from support.doubles import PlainStages
from support.folders import Folder
from support.processes import run_ranks
from support.qwen3 import dense, whole


@attrs.frozen
class OneStage(PlainStages):
    """The whole model as one stage."""

    module: nn.Module

    @property
    def local(self) -> list[Stage]:
        return [Stage(0, 1, LayerRange(0, 2, True, True), self.module)]


def export_of(folder: Path, mesh: Any, **settings: Any) -> HuggingFaceExport:
    model = dense()
    stages: Any = OneStage(whole(model))
    return HuggingFaceExport(model=model, stages=stages, folder=Folder(folder), mesh=mesh, **settings)


def test_the_export_implements_its_port() -> None:
    """The component keeps the promises of a Finisher."""
    assert not find_mismatches(HuggingFaceExport, FinalTask)


def test_an_export_is_written_once(tmp_path: Path, one_rank: Any) -> None:
    """Finishing writes `export/`, is seen as finished, and done again changes nothing."""
    export = export_of(tmp_path, one_rank)
    assert not export.has_result_of_step(6)
    export.run_after_training(6)
    assert export.has_result_of_step(6)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "export").iterdir()}
    export.run_after_training(6)
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "export").iterdir()}
    assert before.keys() == {"config.json", "model.safetensors", "trainer_state.json"}


def test_an_export_of_an_earlier_step_is_replaced(tmp_path: Path, one_rank: Any) -> None:
    """The folder belongs to one step: for a later one it is not finished, and is written again whole."""
    export_of(tmp_path, one_rank, max_shard=4000).run_after_training(6)
    export = export_of(tmp_path, one_rank)
    assert not export.has_result_of_step(12)
    export.run_after_training(12)
    assert export.has_result_of_step(12) and not export.has_result_of_step(6)
    assert os.listdir(tmp_path) == ["export"]
    assert sorted(os.listdir(tmp_path / "export")) == ["config.json", "model.safetensors", "trainer_state.json"]


@attrs.frozen
class WorldMesh:
    """A mesh with nothing but a world."""

    world: Any


def _replicas(folder: Path, late: bool) -> list[str]:
    """Export from two ranks with the same model; list the run folder afterwards."""
    dist.init_process_group("gloo")
    world = TorchGroup("world", [0, 1], dist.group.WORLD, torch.device("cpu"))
    torch.manual_seed(0)
    mesh: Any = WorldMesh(world)
    export = export_of(folder, mesh)
    assert not export.has_result_of_step(6)
    if late and world.rank == 0:
        time.sleep(0.3)
    export.run_after_training(6)
    assert export.has_result_of_step(6)
    return sorted(os.listdir(folder))


def test_replicas_write_one_folder(tmp_path: Path) -> None:
    """Replicas write the model once."""
    assert run_ranks(_replicas, 2, tmp_path, True) == [["export"], ["export"]]
    assert sorted(os.listdir(tmp_path / "export")) == ["config.json", "model.safetensors", "trainer_state.json"]


def test_settings_reach_the_files(tmp_path: Path, one_rank: Any) -> None:
    """The files have the set `dtype` and respect `max_shard`."""
    export_of(tmp_path, one_rank, dtype="float16", max_shard=4000).run_after_training(6)
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.float16}


def test_check_warns_of_classifiers_that_transformers_lacks(tmp_path: Path) -> None:
    """A reward model's export has a warning exactly if transformers has no sequence classifier of the family."""
    node: Any = SimpleNamespace(warning=lambda *words: words)
    model = SimpleNamespace(component=AutoModel, settings={"path": tmp_path}, name="model")
    for has_head in (True, False):
        loss = SimpleNamespace(implements=lambda port: has_head and port is Scorer)  # noqa: B023
        node.neighbour = {"model": model, "loss": loss}.get
        for kind in FAMILIES.values():
            name = kind.model_type
            (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
            lacks = name not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
            assert len(list(HuggingFaceExport.constraints(node))) == (has_head and lacks), name


def test_max_shard_is_at_least_a_byte(tmp_path: Path, one_rank: Any) -> None:
    """A limit of no bytes is refused."""
    with pytest.raises(ValueError, match="max_shard: 0 is less than 1"):
        export_of(tmp_path, one_rank, max_shard=0)
