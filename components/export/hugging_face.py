"""The trained model as a folder that Hugging Face's libraries load."""

from pathlib import Path
from typing import Literal

import torch

from drawloom.components.model_state.hugging_face import MAX_SHARD, write_hugging_face
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import Model, Stages
from drawloom.components.ports.run import RunFolder
from drawloom.graph import above, component, setting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@component
class HuggingFace:
    """Writes `<run folder>/export/` after the last step: config.json, safetensors, tokenizer. The main rank does it."""

    model: Model
    stages: Stages
    folder: RunFolder
    mesh: Mesh
    tokenizer: Tokenizer | None = None
    max_shard: int = setting(
        default=MAX_SHARD, check=above(0), change="free", doc="bytes of tensors in a file, at most"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        default=None, change="free", doc="of the written tensors; left out: as trained"
    )

    def is_finished(self) -> bool:
        return (self._target / "config.json").is_file()

    def finish(self) -> None:
        if self.mesh.world.rank != 0 or self.is_finished():
            return
        tensors = {name: tensor for stage in self.stages.local for name, tensor in stage.module.named_parameters()}
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        write_hugging_face(self._target, tensors, self.model, self.tokenizer, max_shard=self.max_shard, dtype=dtype)

    @property
    def _target(self) -> Path:
        return self.folder.folder / "export"
