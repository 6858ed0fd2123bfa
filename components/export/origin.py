"""Model folders with other parts beside a trained text model, which exports keep unchanged."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.shard_writer import Share
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import KeepsConfig, LanguageModel
from drawloom.components.ports.stages import LoadedStages, Stages
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.tensor_source import TensorSource
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import identity, rename
from drawloom.components.weights.nested import NameNesting, find_multimodal_prefixes, to_multimodal_name
from drawloom.graph import UserError

log = logging.getLogger("drawloom.run")

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files for the inputs of other parts, which exports have, too."""


@attrs.frozen
class OriginFolder:
    """
    Folder with a model's initial weights; exports keep its tensors that are not loaded, `carried`.

    `style` are the prefixes of the text model's tensors, and `config` is the folder's config with the exported model.
    """

    folder: Path
    carried: Sequence[str]
    style: NameNesting
    config: dict[str, Any]

    def map_to_names_in_folder(self, mapper: Mapper) -> Mapper:
        """Return a mapper to the names in the folder, for a mapper to a text model's names."""
        names = {name: to_multimodal_name(name, self.style) for name in mapper.outputs}
        return sequential(mapper, rename(names)) if self.style else mapper

    def add_unloaded_tensors_to(self, share: Share) -> Share:
        """Return a rank's share of the export with the tensors not loaded."""
        source = _CombinedSource(share.source, open_safetensors_folder(self.folder), frozenset(self.carried))
        return Share(source, parallel(share.mapper, identity(*self.carried)), {*share.writes, *self.carried})

    def copy_processor_files(self, target: Path) -> None:
        """Copy the files for other parts' inputs."""
        for name in PROCESSORS:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)


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


def find_folder_with_unloaded_parts(model: LanguageModel, stages: Stages, group: Group) -> OriginFolder | None:
    """
    Return the initial weights' folder if it has other parts, else None.

    A collective: rank 0 reads the folder.
    """
    folder = stages.initial_folder if isinstance(stages, LoadedStages) else None
    if folder is None or not isinstance(model, KeepsConfig):
        return None
    fields = run_on_rank0(group, lambda: _describe_origin_folder_as_json(model, folder))
    return None if fields is None else OriginFolder(folder, **fields)


def _describe_origin_folder_as_json(model: Any, folder: Path) -> dict[str, Any] | None:
    """Return OriginFolder's other fields as JSON, for all ranks; None if the folder has only the text model."""
    try:
        names, patterns = list(open_safetensors_folder(folder).specs()), model.hugging_face_mapper().ignored
        carried = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        style = [list(pair) for pair in find_multimodal_prefixes(names)]
        if not (carried or style):
            return None
        return {"carried": carried, "style": style, "config": model.build_updated_folder_config(folder / "config.json")}
    except UserError as error:
        # The end of a run is too late to refuse the folder.
        log.warning("the export has the text model alone, without other parts of the folder of its weights: %s", error)
        return None
