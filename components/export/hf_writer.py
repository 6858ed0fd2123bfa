"""Writer for model folders that transformers loads; files and keys of an initial folder are kept."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.export.base_folder import BaseFolder, find_base_folder, list_config_and_text_config
from drawloom.components.export.shard_writer import (
    make_share_on_all_ranks,
    parameters_by_name,
    write_safetensors_folder_collectively,
)
from drawloom.components.storage.durable_files import read_file
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.components.weights.adapted import (
    HEAD,
    MergeRoundingLoss,
    build_meta_model_with_adapters,
    gather_and_measure_rounding_loss,
    make_merge_mapper,
)
from drawloom.components.weights.mapper import parallel, rename, select_outputs, sequential
from drawloom.components.weights.save import PlannedFile
from drawloom.ports import (
    LOSS,
    MAX_SHARD,
    SCORE,
    STATE,
    ChatTokenizer,
    ConfigJson,
    EndsAnswers,
    Group,
    LanguageModel,
    LayeredLoss,
    Mapper,
    Scorer,
    Settings,
    Stages,
    Tokenizer,
    run_log,
)

DTYPE_KEYS = ("torch_dtype", "dtype")
"""Keys of a config for the dtype of weights, in transformers 4 and 5."""

MAX_STATE_SIZE = 2**24  # bytes
MAX_VALUES = 2**16  # of a generation_config.json, which has tens

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_token_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return a tokenizer's ids for a `config.json`: begin, end and padding; None if it has no such token."""
    ids = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.eos_id, "pad_token_id": None}
    if isinstance(tokenizer, ChatTokenizer):
        for name in ("bos_token", "pad_token"):
            if token := tokenizer.special_tokens_by_name.get(name):
                encoded = tokenizer.encode_with_control_tokens(token)
                ids[f"{name}_id"] = int(encoded[0]) if len(encoded) == 1 else None
    return ids


def add_end_ids(config: ConfigJson, ids: Collection[int]) -> bool:
    """
    Add ids to a text's ends, in a `config.json` or `generation_config.json`; return whether it changed.
    """
    ends = config.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not (added := [end for end in ids if end not in known]):
        return False
    config["eos_token_id"] = added[0] if ends is None and len(added) == 1 else [*known, *added]
    return True


def add_generation_end_ids(folder: Path, ids: Collection[int]) -> None:
    """
    Add ids to the ones at which transformers' `generate` stops, in an exported folder's generation_config.json.

    A folder without the file gets one, with the token ids of its config.json, unless these have all ids.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            settings = parse_strict_json(path.read_bytes(), max_values=MAX_VALUES)
        except ValueError as error:
            run_log.warning("%s is exported as it is, because it can't be read: %s", path.name, error)
            return
    else:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config |= config.get("text_config", {})
        settings = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    if isinstance(settings, dict) and add_end_ids(settings, ids):
        path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


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
    loss: object = None,
    base: Path | None = None,
    group: Group | None = None,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    chats: Collection[EndsAnswers] = (),
) -> None:
    """
    Write safetensors, `config.json` and the tokenizer files; the folder appears complete or not at all.

    The group's stages together form the model. All ranks call this. `max_shard` is in bytes; without `dtype` tensors
    keep their dtypes; `step` is the weights' step, if known; generation ends at the ends of `chats`, too, and a
    template of theirs replaces the tokenizer's. Adapters are merged into the weights. Other files and keys come from
    the folder `base`, by default the folder of the initial weights.
    With a Scorer as `loss`, the folder is for AutoModelForSequenceClassification: the loss's head replaces the language
    model's; the layers of a LayeredLoss are in it, too.
    Raises UserError if the stages are not the whole model or the target exists.
    """
    group = SingleProcess() if group is None else group
    is_classifier = isinstance(loss, Scorer)
    adapters, merged = stages.local[0].adapters, Mapper(())
    if adapters:
        merged = make_merge_mapper(build_meta_model_with_adapters(model, adapters), _is_tied(model))
    # Other parts than the text model have no classifier.
    origin = find_base_folder(model, stages, group, base, text_only=is_classifier)
    contents = _plan_contents(model, merged, loss, origin, read_token_ids(tokenizer))
    if adapters:
        _gather_and_log_rounding(gather_and_measure_rounding_loss(merged, parameters_by_name(stages), dtype), group)
    share = make_share_on_all_ranks(stages, contents.mapper, group, dtype, only_inputs=is_classifier)
    if contents.origin is not None and contents.origin.carried and group.rank == 0:
        share = contents.origin.add_unloaded_tensors_to(share)

    def write_other_files(folder: Path, files: list[PlannedFile]) -> None:
        contents.write_config_and_kept_files(folder, files, tokenizer, is_cast=dtype is not None)
        if tokenizer is not None:
            # A classifier generates no text: the tokenizer's own end is enough.
            end_ids = frozenset[int]().union(*(chat.answer_end_ids for chat in chats))
            others = [] if is_classifier else sorted(end_ids - {tokenizer.eos_id})
            add_generation_end_ids(folder, [tokenizer.eos_id, *others])
            tokenizer.save(folder)  # after the config, which determines the tokenizer class of transformers
            for template in [chat.template for chat in chats if chat.template is not None][:1]:
                (folder / "chat_template.jinja").write_bytes(template.read_bytes())
        if step is not None:
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")

    write_safetensors_folder_collectively(target, share, group, max_shard, write_other_files)


@attrs.frozen
class _Contents:
    """An export's config, the mapper to its tensors, and the base folder, if there is one."""

    config: ConfigJson
    mapper: Mapper
    origin: BaseFolder | None

    def write_config_and_kept_files(
        self, folder: Path, files: Sequence[PlannedFile], tokenizer: Tokenizer | None, is_cast: bool
    ) -> None:
        """
        Write the config and the base folder's other files. The config names the dtype of the tensors that are not
        carried over from the base.
        """
        carried = () if self.origin is None else self.origin.carried
        specs = {name: spec for file in files for name, spec in file.specs.items() if name not in carried}
        written = _write_config_with_dtype(folder, self.config, specs)
        if self.origin is not None:
            self.origin.copy_other_files(folder, tokenizer)
            if not is_cast:
                self.origin.log_wider_dtype(written)


def _plan_contents(
    model: LanguageModel, merged: Mapper, loss: object, origin: BaseFolder | None, ids: Mapping[str, int | None]
) -> _Contents:
    """Plan an export of a model after `merged`, with the loss's head or layers, and a tokenizer's ids."""
    config = {**model.hugging_face_config(), **ids} if origin is None else origin.config
    mapper = sequential(merged, model.hugging_face_mapper())
    if (end := ids["eos_token_id"]) is not None:
        # training's end id belongs to the parts of the config with such ids
        for part in [part for part in list_config_and_text_config(config) if "eos_token_id" in part] or [config]:
            add_end_ids(part, [end])
    if isinstance(loss, Scorer):
        config = make_sequence_classifier_config(config, loss)
        config["pad_token_id"] = _choose_padding_id(config, ids)
        body = select_outputs(mapper, {*mapper.outputs} - {HEAD})
        mapper = parallel(body, rename({f"{LOSS}.weight": SCORE}))
    elif _is_tied(model) and HEAD in mapper.outputs:
        for part in list_config_and_text_config(config):
            part["tie_word_embeddings"] = False
    if isinstance(loss, LayeredLoss):
        mapper = loss.extend_export(mapper, config)
    if origin is not None:
        mapper = origin.map_to_names_in_folder(mapper)
        written = set(mapper.outputs)
        origin = attrs.evolve(origin, carried=[name for name in origin.carried if name not in written])
    return _Contents(config, mapper, origin)


def _is_tied(model: LanguageModel) -> bool:
    return bool(model.hugging_face_config().get("tie_word_embeddings"))


def _choose_padding_id(config: Settings, ids: Mapping[str, int | None]) -> int | None:
    """
    Return a classifier's padding id: the config's, or the tokenizer's.

    transformers reads the score at the last token that is not padding, so the end of a text can't be padding.
    """
    own: int | None = config.get("pad_token_id")
    return own if own is not None or ids["pad_token_id"] == ids["eos_token_id"] else ids["pad_token_id"]


def make_sequence_classifier_config(config: ConfigJson, head: Scorer) -> ConfigJson:
    """Return a language model's `config.json` with another head."""
    classes = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    names = {str(number): label for number, label in enumerate(head.output_names)}
    numbers = {label: number for number, label in enumerate(head.output_names)}
    return {**config, "architectures": classes, "num_labels": len(names), "id2label": names, "label2id": numbers}


def _gather_and_log_rounding(loss: MergeRoundingLoss, group: Group) -> None:
    """Log the rounding loss from merging adapters, over all ranks."""
    changes, losses = zip(*group.gather_json([loss.change, loss.lost]), strict=True)
    total = MergeRoundingLoss(sum(changes), sum(losses))
    if total.lost and group.rank == 0:
        text = "merged the adapters into the weights: rounding loses %.2g %% of the change"
        run_log.info(text, 100 * total.relative_rounding_loss)


def _write_config_with_dtype(folder: Path, config: ConfigJson, specs: Mapping[str, TensorSpec]) -> str | None:
    """Write `config.json`, and return the matrices' dtype, or None if they have several."""
    # vectors may have a wider dtype, such as the bias of a router
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in specs.values() if len(spec.shape) > 1}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is not None:
        parts = list_config_and_text_config(config)
        if not any(key in part for part in parts for key in DTYPE_KEYS):
            config["torch_dtype"] = dtype
        for part in parts:
            part |= dict.fromkeys([key for key in DTYPE_KEYS if key in part], dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return dtype
