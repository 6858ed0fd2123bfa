"""A model into a folder that `transformers` loads as is."""

import json
from pathlib import Path

import torch

from drawloom.components.model_state.hugging_face import as_hugging_face
from drawloom.components.model_state.safetensors_writing import MAX_SHARD, write_safetensors
from drawloom.components.model_state.whole_folder import whole_folder
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.model import Model, Stages


def write_folder(
    target: Path,
    model: Model,
    stages: Stages,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
) -> None:
    """
    Write safetensors, the tokenizer's files and, last, `config.json`; the folder is whole or absent.

    `max_shard` is in bytes; without `dtype` the numbers stay as they are. UserError if this rank's stages are not the
    whole model, or if the folder is there already.
    """
    tensors = {name: tensor for stage in stages.local for name, tensor in stage.module.named_parameters()}
    source = as_hugging_face(tensors, model.hugging_face_names(), dtype)
    dtypes = {str(kind.dtype).removeprefix("torch.") for kind in source.kinds().values()}
    config = model.hugging_face_config() | ({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})
    with whole_folder(target) as aside:
        write_safetensors(aside, source, max_shard)
        if tokenizer is not None:
            tokenizer.save(aside)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
