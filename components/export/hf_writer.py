"""Writer for model folders that transformers loads; files and keys of an initial folder are kept."""

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch

from drawloom import UserError
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.export.shard_writer import (
    Share,
    make_share_on_all_ranks,
    parameters_by_name,
    write_safetensors_folder_collectively,
)
from drawloom.components.storage.durable_files import read_file
from drawloom.components.storage.safetensors.header import format_names
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.adapted import (
    HEAD,
    MergeRoundingLoss,
    build_meta_model_with_adapters,
    gather_and_measure_rounding_loss,
    make_merge_mapper,
)
from drawloom.components.weights.dequantized import (
    DequantizedSource,
    NameNesting,
    find_multimodal_prefixes,
    to_multimodal_name,
)
from drawloom.components.weights.mapper import identity, parallel, rename, select_outputs, sequential
from drawloom.components.weights.save import PlannedFile
from drawloom.ports import (
    LOSS,
    MAX_SHARD,
    SCORE,
    STATE,
    ChatTokenizer,
    ConfigJson,
    Group,
    KeepsConfig,
    LanguageModel,
    LayeredLoss,
    Mapper,
    Scorer,
    Settings,
    Stages,
    Tokenizer,
)

WRITTEN = (
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "trainer_state.json",
)
"""Name patterns (fnmatch) for the files an export writes."""

WRITTEN_BY_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files written by the run's tokenizer, if there is one."""

KEPT_WITH_TOKENIZER = (
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "tekken.json",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
)
"""Other tokenizer files, which are right if the run's tokenizer is the folder's."""

KEPT = (
    "generation_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",  # of processors
    "*.py",  # code that `auto_map` in a config may name
    "LICENSE*",
    "NOTICE*",
    "modules.json",  # of sentence-transformers, as the next ones
    "*sentence_*.json",
    "[0-9]_*/*",
)
"""Files that an export has unchanged. All files without a pattern here, such as other formats, are named in the log."""

NOT_EXPORTED_KEYS = ("quantization_config", "compression_config")
"""Config keys for quantized weights: exported weights are dequantized."""


@attrs.frozen
class BaseFolder:
    """
    Folder with a model's initial weights; exports keep its unloaded tensors, `carried`.

    `style` are the text model's tensor prefixes, `config` is the folder's config with the exported model, and
    `dtypes` are its matrices' dtypes by name.
    """

    folder: Path
    carried: Sequence[str]
    style: NameNesting
    config: ConfigJson
    dtypes: Sequence[str]

    def map_to_names_in_folder(self, mapper: Mapper) -> Mapper:
        """Return a mapper to the names in the folder, for a mapper to a text model's names."""
        names = {name: to_multimodal_name(name, self.style) for name in mapper.outputs}
        return sequential(mapper, rename(names)) if self.style else mapper

    def add_unloaded_tensors_to(self, share: Share) -> Share:
        """Return a rank's share in the export with the tensors not loaded."""
        source = _CombinedSource(share.source, _open_source(self.folder), frozenset(self.carried))
        return Share(source, parallel(share.mapper, identity(*self.carried)), {*share.writes, *self.carried})

    def copy_other_files(self, target: Path, tokenizer: Tokenizer | None) -> None:
        """Copy the files to keep, and log the other names."""
        kept: tuple[str, ...] = KEPT
        if tokenizer is None:
            kept = (*kept, *WRITTEN_BY_TOKENIZER, *KEPT_WITH_TOKENIZER)
        elif _writes_tokenizer_of(self.folder, tokenizer):
            kept = (*kept, *KEPT_WITH_TOKENIZER)
        dropped = []
        for name in sorted(_list_files(self.folder)):
            if _matches(name, kept):
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(self.folder / name, target / name)
            elif not _matches(name, (*WRITTEN, *(() if tokenizer is None else WRITTEN_BY_TOKENIZER))):
                dropped.append(name)
        if dropped:
            log.info("the export has no copies of these files in %s: %s", self.folder, format_names(dropped))

    def log_wider_dtype(self, exported: str | None) -> None:
        """Log it if exported matrices are float32, and the folder's are narrower."""
        if exported == "float32" and len(self.dtypes) == 1 and self.dtypes[0] in ("bfloat16", "float16"):
            text = 'the export is in float32, as trained, and %s in %s; dtype = "%s" in [export] writes that'
            log.info(text, self.folder, self.dtypes[0], self.dtypes[0])


@attrs.frozen
class _CombinedSource:
    """Tensor source: `carried` tensors come from a folder, all others from a rank's parameters."""

    own: TensorSource
    folder: TensorSource
    carried: frozenset[str]

    def specs(self) -> Mapping[str, Any]:
        kept = self.folder.specs()
        return {**self.own.specs(), **{name: kept[name] for name in kept if name in self.carried}}

    def tensor(self, name: str) -> Any:
        return (self.folder if name in self.carried else self.own).tensor(name)


def find_base_folder(
    model: LanguageModel, stages: Stages, group: Group, base: Path | None, text_only: bool
) -> BaseFolder | None:
    """
    Return the folder `base`, or the initial weights' folder, without other parts than the text model if `text_only`.

    None if there is none. A collective: rank 0 reads the folder.
    """
    folder = base or stages.initial_folder
    if folder is None:
        return None
    fields = run_on_rank0(group, lambda: _describe_base_folder_as_json(model, folder, text_only))
    return None if fields is None else BaseFolder(folder, **fields)


def _describe_base_folder_as_json(model: LanguageModel, folder: Path, text_only: bool) -> ConfigJson | None:
    """Return BaseFolder's other fields as JSON, for all ranks; None if the folder can't be read."""
    try:
        specs, patterns = _open_source(folder).specs(), model.hugging_face_mapper().ignored
        carried = [name for name in specs if any(fnmatchcase(name, pattern) for pattern in patterns)]
        style = [list(pair) for pair in find_multimodal_prefixes(specs)]
        config = model.hugging_face_config()
        if isinstance(model, KeepsConfig) and (folder / "config.json").is_file():
            config = model.build_updated_folder_config(folder / "config.json", text_only)
        for part in list_config_and_text_config(config):
            for key in NOT_EXPORTED_KEYS:
                part.pop(key, None)
        dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values() if len(spec.shape) > 1})
        others = {"carried": carried, "style": style} if not text_only else {"carried": [], "style": []}
        return {**others, "config": config, "dtypes": dtypes}
    except UserError as error:
        # The end of a run is too late to refuse the folder.
        log.warning("the export has the trained model alone, and no other files of the base folder: %s", error)
        return None


def _open_source(folder: Path) -> TensorSource:
    return DequantizedSource(open_safetensors_folder(folder))


def list_config_and_text_config(config: ConfigJson) -> list[ConfigJson]:
    """Return the config, and its `text_config` table if it has one (multimodal models)."""
    return [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's files, also inside its folders, without hidden ones."""
    for path in folder.iterdir():
        inner = path.iterdir() if path.is_dir() else ()
        for file in (path, *inner):
            name = str(file.relative_to(folder))
            if file.is_file() and not name.startswith("."):
                yield name


def _matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether a name matches a pattern; a star does not match a slash."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _writes_tokenizer_of(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer writes the same `tokenizer.json` as a folder has."""
    file = folder / "tokenizer.json"
    with TemporaryDirectory() as written:
        tokenizer.save(Path(written))
        copy = Path(written) / file.name
        return file.is_file() and copy.is_file() and file.read_bytes() == copy.read_bytes()


def read_token_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return a tokenizer's ids for a `config.json`: begin, end and padding; None if it has no such token."""
    ids = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.eos_id, "pad_token_id": None}
    if isinstance(tokenizer, ChatTokenizer):
        for name in ("bos_token", "pad_token"):
            if token := tokenizer.special_tokens_by_name.get(name):
                encoded = tokenizer.encode_with_control_tokens(token)
                ids[f"{name}_id"] = int(encoded[0]) if len(encoded) == 1 else None
    return ids


log = logging.getLogger("drawloom.run")

DTYPE_KEYS = ("torch_dtype", "dtype")
"""Keys of a config for the dtype of weights, in transformers 4 and 5."""

MAX_STATE_SIZE = 2**24  # bytes


MAX_VALUES = 2**16  # of a generation_config.json, which has tens

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
            log.warning("%s is exported as it is, because it can't be read: %s", path.name, error)
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
    end_ids: Collection[int] = (),
) -> None:
    """
    Write safetensors, `config.json` and the tokenizer files; the folder appears complete or not at all.

    The group's stages together form the model. All ranks call this. `max_shard` is in bytes; without `dtype` tensors
    keep their dtypes; `step` is the weights' step, if known; generation ends at `end_ids`, too. Adapters are merged
    into the weights. Other files and keys come from the folder `base`, by default the folder of the initial weights.
    With a Scorer as `loss`, the folder is for AutoModelForSequenceClassification: the loss's head replaces the language
    model's; the layers of a LayeredLoss are in it, too.
    Raises UserError if the stages are not the whole model or the target exists.
    """
    group = SingleProcess() if group is None else group
    head = loss if isinstance(loss, Scorer) else None
    config = model.hugging_face_config()
    adapters = stages.local[0].adapters
    tied, merged = bool(config.get("tie_word_embeddings")), Mapper(())
    if adapters:
        merged = make_merge_mapper(build_meta_model_with_adapters(model, adapters), tied)
    mapper = sequential(merged, model.hugging_face_mapper())
    origin = find_base_folder(model, stages, group, base, text_only=head is not None)  # other parts have no classifier
    ids = read_token_ids(tokenizer)
    config = {**config, **ids} if origin is None else origin.config
    _add_end_of_training(config, ids)
    if head is not None:
        config = make_sequence_classifier_config(config, head)
        config["pad_token_id"] = _choose_padding_id(config, ids)
        body = select_outputs(mapper, {*mapper.outputs} - {HEAD})
        mapper = parallel(body, rename({f"{LOSS}.weight": SCORE}))
    elif tied and HEAD in mapper.outputs:
        for part in list_config_and_text_config(config):
            part["tie_word_embeddings"] = False
    if isinstance(loss, LayeredLoss):
        mapper = loss.extend_export(mapper, config)
    if origin is not None:
        mapper = origin.map_to_names_in_folder(mapper)
        written = set(mapper.outputs)
        origin = attrs.evolve(origin, carried=[name for name in origin.carried if name not in written])
    if adapters:
        _gather_and_log_rounding(gather_and_measure_rounding_loss(merged, parameters_by_name(stages), dtype), group)

    def write_other_files(folder: Path, files: list[PlannedFile]) -> None:
        """
        Write the config, the base folder's other files, the tokenizer and the step. The config names the dtype of the
        tensors that are not carried over from the base.
        """
        carried = () if origin is None else origin.carried
        specs = {name: spec for file in files for name, spec in file.specs.items() if name not in carried}
        written = _write_config_with_dtype(folder, config, specs)
        if origin is not None:
            origin.copy_other_files(folder, tokenizer)
            if dtype is None:
                origin.log_wider_dtype(written)
        if tokenizer is not None:
            # A classifier generates no text: the tokenizer's own end is enough.
            others = [] if head is not None else sorted({*end_ids} - {tokenizer.eos_id})
            add_generation_end_ids(folder, [tokenizer.eos_id, *others])
            tokenizer.save(folder)  # after the config, which determines the tokenizer class of transformers
        if step is not None:
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")

    own = make_share_on_all_ranks(stages, mapper, group, dtype, only_inputs=head is not None)
    if origin is not None and origin.carried and group.rank == 0:
        own = origin.add_unloaded_tensors_to(own)
    write_safetensors_folder_collectively(target, own, group, max_shard, write_other_files)


def _add_end_of_training(config: ConfigJson, ids: Mapping[str, int | None]) -> None:
    """Add training's end id to a config, or to its parts with such ids."""
    parts = [part for part in list_config_and_text_config(config) if "eos_token_id" in part] or [config]
    if (end := ids["eos_token_id"]) is not None:
        for part in parts:
            add_end_ids(part, [end])


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
        log.info(text, 100 * total.relative_rounding_loss)


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
