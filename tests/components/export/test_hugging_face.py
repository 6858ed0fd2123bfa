"""Exporting at the end of a run."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drawloom.components.export.hugging_face import HuggingFaceExport
from drawloom.components.ports.model import Span, Stage
from drawloom.components.ports.run import Finisher
from drawloom.graph.fit import misfits
from support.qwen3 import dense, whole


@attrs.frozen
class FakeFolder:
    """A run folder."""

    folder: Path


@attrs.frozen
class OneStage:
    """The whole model as one stage."""

    module: nn.Module

    @property
    def local(self) -> list[Stage]:
        return [Stage(0, 1, Span(0, 2, True, True), self.module)]


@attrs.frozen
class RankOfTwo:
    """A group of two."""

    rank: int
    size: int = 2


def export_of(folder: Path, mesh: Any, **settings: Any) -> HuggingFaceExport:
    model = dense()
    stages: Any = OneStage(whole(model))
    return HuggingFaceExport(model=model, stages=stages, folder=FakeFolder(folder), mesh=mesh, **settings)


def test_fits_its_port() -> None:
    """The component keeps the promises of a Finisher."""
    assert misfits(HuggingFaceExport, Finisher) == []


def test_writes_export_once(tmp_path: Path, one_rank: Any) -> None:
    """Finishing writes `export/`, is seen as finished, and done again changes nothing."""
    export = export_of(tmp_path, one_rank)
    assert not export.is_finished()
    export.finish()
    assert export.is_finished()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "export").iterdir()}
    export.finish()
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "export").iterdir()}
    assert before.keys() == {"config.json", "model.safetensors"}


def test_main_rank_writes(tmp_path: Path, mesh_of: Any) -> None:
    """Of two ranks only the first writes."""
    export_of(tmp_path, mesh_of(world=RankOfTwo(1))).finish()
    assert not (tmp_path / "export").exists()
    export_of(tmp_path, mesh_of(world=RankOfTwo(0))).finish()
    assert (tmp_path / "export").exists()


def test_settings_reach_the_files(tmp_path: Path, one_rank: Any) -> None:
    """`dtype` and `max_shard` are those of the files."""
    export_of(tmp_path, one_rank, dtype="float16", max_shard=4000).finish()
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.float16}


def test_max_shard_is_at_least_a_byte(tmp_path: Path, one_rank: Any) -> None:
    """A limit of no bytes is refused."""
    with pytest.raises(ValueError, match="max_shard: 0 is less than 1"):
        export_of(tmp_path, one_rank, max_shard=0)
