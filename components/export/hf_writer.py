"""Writer for model folders that transformers loads."""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.export.generation_config import add_end_ids_to_generation_config
from drawloom.components.export.origin import find_folder_with_unloaded_parts
from drawloom.components.export.shard_writer import (
    loss_parameters_by_name,
    make_share_on_all_ranks,
    model_parameters_by_name,
    write_safetensors_folder_collectively,
)
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.pipeline import SCORE, SequenceHead
from drawloom.components.ports.stages import LOSS, Stages
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.regular_file import read_file
from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.components.weights.adapted import (
    HEAD,
    MergeRoundingLoss,
    build_meta_model_with_adapters,
    gather_and_measure_rounding_loss,
    make_merge_mapper,
)
from drawloom.components.weights.mapper import parallel, select_outputs, sequential
from drawloom.components.weights.mapper_ops import rename
from drawloom.components.weights.save import MAX_SHARD, PlannedFile

log = logging.getLogger("drawloom.run")

STATE = "trainer_state.json"
"""Name of the file with the step of the weights, as in Hugging Face's Trainer."""

DTYPE_KEYS = ("torch_dtype", "dtype")
"""Keys of a config for the dtype of weights, in transformers 4 and 5."""

MAX_STATE_SIZE = 2**24  # bytes


def read_exported_step(folder: Path) -> int | None:
    """Return the weights' step from an exported folder, or None if it is missing or unknown."""
    try:
        state = json.loads(read_file(folder / STATE, MAX_STATE_SIZE))
    except (OSError, ValueError, RecursionError):
        return None
    return state.get("global_step") if isinstance(state, dict) else None


def write_hugging_face_folder(
    target: Path,
    model: LanguageModel,
    stages: Stages,
    tokenizer: Tokenizer | None = None,
    *,
    head: SequenceHead | None = None,
    group: Group | None = None,
    workspace: Path | None = None,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    end_ids: Collection[int] = (),
) -> None:
    """
    Write safetensors, `config.json` and the tokenizer files; the folder appears complete or not at all.

    The group's stages together form the model. All ranks call this, and exchange their parameters through `workspace`,
    a folder visible to all ranks, or through their machine's shared memory. `max_shard` is in bytes; without `dtype`
    tensors keep their dtypes; `step` is the weights' step, if known; generation ends at `end_ids`, too. Adapters are
    merged into the weights. With `head`, the folder is for AutoModelForSequenceClassification: the loss's head replaces
    the language model's. Raises UserError if the stages are not the whole model or the target exists.
    """
    group = SingleProcess() if group is None else group
    config = model.hugging_face_config()
    adapters = stages.local[0].adapters
    tied, merged = bool(config.get("tie_word_embeddings")), Mapper(())
    if adapters:
        merged = make_merge_mapper(build_meta_model_with_adapters(model, adapters), tied)
    mapper = sequential(merged, model.hugging_face_mapper())
    if head is not None:
        config = make_sequence_classifier_config(config, head)
        body = select_outputs(mapper, {*mapper.outputs} - {HEAD})
        mapper = parallel(body, rename({f"{LOSS}.weight": SCORE}))
    origin = (
        find_folder_with_unloaded_parts(model, stages, group) if head is None else None
    )  # other parts have no such class
    if origin is not None:
        config = origin.config
    if tied and HEAD in mapper.outputs:
        for part in _list_config_and_text_config(config):
            part["tie_word_embeddings"] = False
    if origin is not None:
        mapper = origin.map_to_names_in_folder(mapper)
    if adapters:
        _gather_and_log_merge_rounding_loss(
            gather_and_measure_rounding_loss(merged, model_parameters_by_name(stages), dtype), group
        )

    def write_other_files(folder: Path, files: list[PlannedFile]) -> None:
        carried = () if origin is None else origin.carried
        specs = {name: spec for file in files for name, spec in file.specs.items() if name not in carried}
        _write_config_with_dtype(folder, config, specs)
        if origin is not None:
            origin.copy_processor_files(folder)
        if tokenizer is not None:  # after the config, which determines the tokenizer class of transformers
            tokenizer.save(folder)
        if head is None:
            add_end_ids_to_generation_config(folder, end_ids)
        if step is not None:
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")

    others = None if head is None else loss_parameters_by_name(stages)
    own = make_share_on_all_ranks(stages, mapper, group, workspace, dtype, only_inputs=head is not None, others=others)
    if origin is not None and group.rank == 0:
        own = origin.add_unloaded_tensors_to(own)
    write_safetensors_folder_collectively(target, own, group, max_shard, write_other_files)


def make_sequence_classifier_config(config: dict[str, Any], head: SequenceHead) -> dict[str, Any]:
    """Return a language model's `config.json` with another head."""
    classes = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    names = {str(number): label for number, label in enumerate(head.output_names)}
    numbers = {label: number for number, label in enumerate(head.output_names)}
    # There is no lm_head: a language model of this folder would use its embedding.
    others = {"architectures": classes, "tie_word_embeddings": True}
    return {**config, **others, "num_labels": len(names), "id2label": names, "label2id": numbers}


def _gather_and_log_merge_rounding_loss(loss: MergeRoundingLoss, group: Group) -> None:
    """Log the rounding loss from merging adapters, over all ranks."""
    changes, losses = zip(*group.gather_json([loss.change, loss.lost]), strict=True)
    total = MergeRoundingLoss(sum(changes), sum(losses))
    if total.lost and group.rank == 0:
        text = "merged the adapters into the weights: rounding loses %.2g %% of the change"
        log.info(text, 100 * total.relative_rounding_loss)


def _list_config_and_text_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the config, and its `text_config` table if it has one (multimodal models)."""
    return [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]


def _write_config_with_dtype(folder: Path, config: dict[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    # vectors may have a wider dtype, such as the bias of a router
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in specs.values() if len(spec.shape) > 1}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        if not any(key in part for part in _list_config_and_text_config(config) for key in DTYPE_KEYS):
            config["torch_dtype"] = dtype
        for part in _list_config_and_text_config(config):
            part |= dict.fromkeys([key for key in DTYPE_KEYS if key in part], dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
