"""Folder with a model's initial weights: an export keeps its keys, its files, and the tensors that were not loaded."""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from drawloom import UserError
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.shard_writer import Share
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.safetensors.writer import format_names
from drawloom.components.storage.tensor_source import TensorSource
from drawloom.components.weights.dequantized import (
    DequantizedSource,
    NameNesting,
    find_multimodal_prefixes,
    to_multimodal_name,
)
from drawloom.components.weights.mapper import identity, parallel, rename, sequential
from drawloom.ports import ConfigJson, Group, KeepsConfig, LanguageModel, Mapper, Stages, Tokenizer, run_log

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
            run_log.info("the export has no copies of these files in %s: %s", self.folder, format_names(dropped))

    def log_wider_dtype(self, exported: str | None) -> None:
        """Log it if exported matrices are float32, and the folder's are narrower."""
        if exported == "float32" and len(self.dtypes) == 1 and self.dtypes[0] in ("bfloat16", "float16"):
            text = 'the export is in float32, as trained, and %s in %s; dtype = "%s" in [export] writes that'
            run_log.info(text, self.folder, self.dtypes[0], self.dtypes[0])


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
        others = {"carried": [], "style": []} if text_only else {"carried": carried, "style": style}
        return {**others, "config": config, "dtypes": dtypes}
    except UserError as error:
        # The end of a run is too late to refuse the folder.
        run_log.warning("the export has the trained model alone, and no other files of the base folder: %s", error)
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
