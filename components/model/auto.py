"""The component `model.auto`: a model of any family, from a Hugging Face folder."""

import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError, component, setting
from drawloom.components.model.decoder.builder import DecoderBuilder, DecoderModel
from drawloom.components.model.decoder.family import Family
from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config, read_config_json
from drawloom.components.model.deepseek_v2 import DeepseekV2
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.gemma3 import Gemma3
from drawloom.components.model.gemma4 import Gemma4
from drawloom.components.model.glm4_moe import Glm4Moe
from drawloom.components.model.glm4_moe_lite import Glm4MoeLite
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.granite import Granite
from drawloom.components.model.kimi_linear import KimiLinear
from drawloom.components.model.lfm2 import Lfm2
from drawloom.components.model.llama import Llama
from drawloom.components.model.minimax_m2 import MiniMaxM2
from drawloom.components.model.mistral import Mistral
from drawloom.components.model.nemotron_h import NemotronH
from drawloom.components.model.olmo2 import Olmo2
from drawloom.components.model.olmo3 import Olmo3
from drawloom.components.model.olmo_hybrid import OlmoHybrid
from drawloom.components.model.phi3 import Phi3
from drawloom.components.model.qwen2 import Qwen2
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.model.qwen3_5_moe import Qwen35Moe
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.model.smollm3 import SmolLm3
from drawloom.components.weights.load import open_and_check_folder
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import ADAPTER_CONFIG, Settings

FAMILIES: dict[str, type[DecoderBuilder]] = {
    model_type: kind
    for kind in (
        DeepseekV2,
        DeepseekV3,
        Dots1,
        Gemma3,
        Gemma4,
        Glm4Moe,
        Glm4MoeLite,
        GptOss,
        Granite,
        KimiLinear,
        Lfm2,
        Llama,
        MiniMaxM2,
        Mistral,
        NemotronH,
        Olmo2,
        Olmo3,
        OlmoHybrid,
        Phi3,
        Qwen2,
        Qwen3Dense,
        Qwen3Moe,
        Qwen35,
        Qwen35Moe,
        Qwen3Next,
        SmolLm3,
    )
    for model_type in (kind.family.model_type, *kind.family.other_types, *kind.family.nested_types)
}
"""Model components by `model_type`."""


@component(impact="incompatible")
class AutoModel(DecoderModel):
    """
    Model from a Hugging Face folder or a run's `export/`, which decides its family, sizes and initial weights.

    `[stages] weights` may replace the weights by others of the same sizes.
    """

    path: Path = setting("folder with a config.json, and with safetensors files if `weights` is true")
    weights: bool = setting(
        "load the folder's weights; false for random weights", default=True, impact="changes_training"
    )

    def check_before_open(self) -> None:
        """Raise UserError for an invalid config, a folder without weights, or a tokenizer with too many ids."""
        try:
            self._check_path()
            _ = read_config(self.family, self.path)
            if self.weights and not any(self.path.glob("*.safetensors")):
                raise UserError(f"{self.path} has no safetensors files; write weights = false for random weights")
            if self.weights:
                self._check_tensors()
            _ = self.architecture  # last, so that an unreadable tokenizer does not hide other errors
        except UserError as error:
            raise UserError(f"path: {str(error).removeprefix('config: ')}") from error

    def _check_path(self) -> None:
        """Raise UserError if the path is missing, a run folder, or a file although weights are to be loaded."""
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

    def _check_tensors(self) -> None:
        """Raise UserError if names or shapes of the folder's tensors do not match its config."""
        kernels: Any = None  # only a forward pass needs kernels
        model = AutoModel(kernels=kernels, path=self.path, new_tokens=self.new_tokens)
        open_and_check_folder(self.path, model.build_on_meta(), model.hugging_face_mapper().inverse())

    @classmethod
    def read_sizes(cls, node: Any) -> Settings:
        path = node.settings["path"]
        with suppress(UserError):
            return attrs.asdict(read_config(_find_builder_class(path).family, path), recurse=False)
        return {}

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        with suppress(UserError):  # a problem of its own
            return _find_builder_class(node.settings["path"]).family.has_classifier
        return True

    @cached_property
    def family(self) -> Family:
        return _find_builder_class(self.path).family

    @property
    def config_settings(self) -> Settings:
        return dict.fromkeys((*self.family.keys, "rope_parameters")) | {"config": self.path}

    @property
    def initial_weights(self) -> Path | None:
        return self.path if self.weights else None

    def list_input_files(self) -> dict[str, list[Path]]:
        return {"path": [locate_config_json(self.path)]}


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
