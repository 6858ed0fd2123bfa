"""Writes a model as a folder that `transformers` loads."""

import json
from pathlib import Path

import torch

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.shard_writer import choose_owners, holding, share, write_shares
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import Model, Stages
from drawloom.components.weights.save import MAX_SHARD, PlannedFile
from drawloom.components.workspace.workspace import get_configs_parallel

STATE = "trainer_state.json"
"""The file with the step of the weights, by the name that Hugging Face's Trainer gives it."""


def exported_step(folder: Path) -> int | None:
    """The step of an exported folder's weights; None if there is no folder, or if it does not say."""
    try:
        state = json.loads((folder / STATE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return state.get("global_step") if isinstance(state, dict) else None


def write_folder(
    target: Path,
    model: Model,
    stages: Stages,
    tokenizer: Tokenizer | None = None,
    *,
    group: Group | None = None,
    workspace: Path | None = None,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
    step: int | None = None,
) -> None:
    """
    Write safetensors, the tokenizer's files and, last, `config.json`; the folder appears complete or not at all.

    The stages of all ranks of the group make up the model. All ranks call this, and exchange what they hold through
    `workspace`, a folder that all ranks see, or through shared memory of their machine. `max_shard` is in bytes;
    without `dtype` tensors keep theirs; `step` is that of the weights, if known. Raises UserError if the stages are not
    the whole model or the target exists.
    """
    group = SingleProcess() if group is None else group
    mapper = model.hugging_face_mapper()
    with get_configs_parallel(holding(stages), range(group.size), group, workspace) as holdings:
        owners = run_on_rank0(group, lambda: choose_owners(mapper, holdings))
    tensors = {name: tensor for stage in stages.local for name, tensor in stage.model_parameters().items()}
    mine = share(tensors, mapper, [n for n, owner in enumerate(owners) if owner == group.rank], dtype)

    def finish(folder: Path, files: list[PlannedFile]) -> None:
        if tokenizer is not None:
            tokenizer.save(folder)
        if step is not None:
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")
        _write_config(folder, model, files)

    write_shares(target, mine, group, max_shard, finish)


def _write_config(folder: Path, model: Model, files: list[PlannedFile]) -> None:
    dtypes = {str(spec.dtype).removeprefix("torch.") for file in files for spec in file.specs.values()}
    config = model.hugging_face_config() | ({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
