"""A model into a folder that `transformers` loads as is."""

import json
from pathlib import Path

import torch

from drawloom.components.model_state.listing import listed
from drawloom.components.model_state.safetensors_writing import MAX_SHARD, all_kinds, write_safetensors
from drawloom.components.model_state.tensor_source import AsType, InMemory
from drawloom.components.model_state.whole_folder import whole_folder
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.model import Model, Stages
from drawloom.graph import UserError


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
    mapper = model.hugging_face_mapper()
    missing = [name for name in mapper.inputs if name not in tensors]
    nameless = [name for name in tensors if name not in set(mapper.inputs)]
    if missing or nameless:
        lists = [("missing", missing), ("no name there for", nameless)]
        told = "; ".join(f"{what} {listed(which)}" for what, which in lists if which)
        raise UserError(f"the tensors to write are not those of the model: {told}; export where all of it is held")
    source = InMemory(tensors) if dtype is None else AsType(InMemory(tensors), dtype)
    dtypes = {str(kind.dtype).removeprefix("torch.") for kind in all_kinds(source, mapper).values()}
    config = model.hugging_face_config() | ({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})
    with whole_folder(target) as aside:
        write_safetensors(aside, source, mapper, max_shard)
        if tokenizer is not None:
            tokenizer.save(aside)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
