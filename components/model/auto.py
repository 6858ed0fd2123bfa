"""The component `model.auto`: a model of any family, from a Hugging Face folder."""

import json
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError, component, setting
from drawloom.components.model.decoder.builder import DecoderBuilder, DecoderModel
from drawloom.components.model.decoder.config import Family
from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config, read_config_json
from drawloom.components.weights.load import open_and_check_folder
from drawloom.graph import component_base_class
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import ADAPTER_CONFIG, Settings

MODULES = (
    *(
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "gemma3",
        "gemma4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "granite",
    ),
    *("kimi_linear", "lfm2", "llama", "minimax_m2", "mistral", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid"),
    *("phi3", "qwen2", "qwen3.dense", "qwen3.moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "smollm3"),
)
"""Modules with a family, below this package."""

FAMILIES: dict[str, type[DecoderBuilder]] = {
    model_type: kind
    for module in MODULES
    for kind in vars(import_module(f"{__package__}.{module}")).values()
    if isinstance(kind, type) and issubclass(kind, DecoderBuilder) and "config_type" in vars(kind)
    for model_type in (kind.model_type, *kind.other_types, *kind.nested_types)
}
"""Model components by `model_type`."""


@component_base_class
class FolderModel:
    """Model in a folder, whose config decides the layers, and whose weights are loaded."""

    path: Path = setting("folder with a config.json, and with safetensors files if `weights` is true")
    weights: bool = setting(
        "load the folder's weights; false for random weights", default=True, impact="changes_training"
    )

    def check_before_open(self) -> None:
        """Raise UserError for an invalid folder or model, or a tokenizer with too many ids."""
        try:
            self._check_path()
            self.check_model()
        except UserError as error:
            raise UserError(f"path: {str(error).removeprefix('config: ')}") from error

    def check_model(self) -> None:
        """Raise UserError for a model or weights that can't be built, or a tokenizer with too many ids."""
        raise NotImplementedError

    def _check_path(self) -> None:
        """Raise UserError if the path is missing, no model's folder, or lacks the weights to load."""
        path = self.path
        if not path.exists():
            # Names of models on the hub have two parts.
            on_hub = len(path.parts) == 2 and not path.is_absolute()
            download = f", such as `hf download {path} --local-dir {path.name}` makes" if on_hub else ""
            raise UserError(f"there is no folder {path}; write one with a config.json{download}")
        if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
            text = f"{path} is an adapter's folder, without a model"
            raise UserError(f"{text}; write its base model's folder, and stages.adapter_weights = {str(path)!r}")
        if (path / LOCK).is_file():
            raise UserError(f"{path} is a run folder; write its export, {path / 'export'}")
        if self.weights and path.is_file():
            raise UserError(f"{path} is a file, but weights are loaded from a folder; write {path.parent}")
        read_config_json(locate_config_json(path))
        if self.weights and not any(path.glob("*.safetensors")):
            raise UserError(f"{path} has no safetensors files; write weights = false for random weights")

    @property
    def initial_weights(self) -> Path | None:
        return self.path if self.weights else None

    def list_input_files(self) -> dict[str, list[Path]]:
        return {"path": [locate_config_json(self.path)]}


@component(impact="incompatible")
class AutoModel(FolderModel, DecoderModel):
    """
    Model from a Hugging Face folder or a run's `export/`, which decides its family, sizes and initial weights.

    `[stages] weights` may replace the weights by others of the same sizes.
    """

    def check_model(self) -> None:
        """Raise UserError for an invalid config, tensors that do not match it, or a tokenizer with too many ids."""
        _ = read_config(self.family, self.path)
        if self.weights:
            kernels: Any = None  # only a forward pass needs kernels
            model = AutoModel(kernels=kernels, path=self.path, new_tokens=self.new_tokens)
            open_and_check_folder(self.path, model.build_on_meta(), model.hugging_face_mapper().inverse())
        _ = self.architecture  # last, so that an unreadable tokenizer does not hide other errors

    @classmethod
    def read_sizes(cls, node: Any) -> Settings:
        with suppress(UserError, KeyError):  # a missing path is a problem of its own
            path = node.settings["path"]
            return attrs.asdict(read_config(_find_builder_class(path), path), recurse=False)
        return {}

    @classmethod
    def find_family(cls, node: Any) -> type[Family] | None:
        with suppress(UserError, KeyError):
            return _find_builder_class(node.settings["path"])
        return None

    @cached_property
    def family(self) -> type[Family]:
        return _find_builder_class(self.path)

    @property
    def config_settings(self) -> Settings:
        return {"config": self.path}


def _find_builder_class(path: Path) -> type[DecoderBuilder]:
    """Return the builder class for a `config.json`'s family. Raises UserError for an unknown family."""
    file = locate_config_json(path)
    kind = read_config_json(file).get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"config: {file} says model_type = {json.dumps(kind)}; take a model of one of {known}, write "
            'use = "model.transformers", or add its family (docs/families.md)'
        )
    return FAMILIES[kind]
