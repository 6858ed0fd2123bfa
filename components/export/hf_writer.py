"""Writes a model as a folder that `transformers` loads."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.export.shard_writer import held, write_stages
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.stages import Stages
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.regular_file import read_file
from drawloom.components.weights.adapted import HEAD, MergeError, adapted_model, merge_error, merge_mapper
from drawloom.components.weights.mapper import sequential
from drawloom.components.weights.save import MAX_SHARD, PlannedFile

log = logging.getLogger("drawloom.run")

STATE = "trainer_state.json"
"""The file with the step of the weights, by the name that Hugging Face's Trainer gives it."""

LARGEST_STATE = 2**24  # bytes


def exported_step(folder: Path) -> int | None:
    """The step of an exported folder's weights; None if there is no folder, or if it does not say."""
    try:
        state = json.loads(read_file(folder / STATE, LARGEST_STATE))
    except (OSError, ValueError, RecursionError):
        return None
    return state.get("global_step") if isinstance(state, dict) else None


def write_folder(
    target: Path,
    model: LanguageModel,
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
    Write safetensors, `config.json` and the tokenizer's files; the folder appears complete or not at all.

    The stages of all ranks of the group make up the model. All ranks call this, and exchange what they hold through
    `workspace`, a folder that all ranks see, or through shared memory of their machine. `max_shard` is in bytes;
    without `dtype` tensors keep theirs; `step` is that of the weights, if known. Adapters are merged into the weights.
    Raises UserError if the stages are not the whole model or the target exists.
    """
    group = SingleProcess() if group is None else group
    config = model.hugging_face_config()
    adapters = stages.local[0].adapters
    merged = Mapper(())
    if adapters:
        merged = merge_mapper(adapted_model(model, adapters), bool(config.get("tie_word_embeddings")))
    mapper = sequential(merged, model.hugging_face_mapper())
    if HEAD in mapper.outputs:
        config["tie_word_embeddings"] = False
    if adapters:
        _log_merge_error(merge_error(merged, held(stages), dtype), group)

    def finish(folder: Path, files: list[PlannedFile]) -> None:
        _write_config(folder, config, files)
        if tokenizer is not None:  # after the config, by which transformers chooses a class of tokenizer
            tokenizer.save(folder)
        if step is not None:
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")

    write_stages(target, stages, mapper, finish, group, workspace=workspace, max_shard=max_shard, dtype=dtype)


def _log_merge_error(mine: MergeError, group: Group) -> None:
    """Print what merging adapters into a narrow dtype has lost, over all ranks."""
    each = [MergeError(change, lost) for change, lost in group.gather_json([mine.change, mine.lost])]
    total = MergeError(sum(one.change for one in each), sum(one.lost for one in each))
    if total.lost and group.rank == 0:
        text = "merged the adapters into the weights: rounding loses %.2g %% of the change"
        log.info(text, 100 * total.relative)


def _write_config(folder: Path, config: dict[str, Any], files: list[PlannedFile]) -> None:
    # Vectors may be wider, such as a router's bias.
    specs = [spec for file in files for spec in file.specs.values() if len(spec.shape) > 1]
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in specs}
    config = config | ({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
