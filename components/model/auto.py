"""The component `model.auto`: a model of any family, from a Hugging Face folder."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
from torch import Tensor, nn

from drawloom.components.model.decoder.builder import NEW_TOKENS_ARE_WHOLE, DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig, find_tensor_parallel_faults, num_experts
from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config, read_config_json
from drawloom.components.model.decoder.rope import find_context_parallel_faults
from drawloom.components.model.deepseek_v2 import DeepseekV2
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.gemma3 import Gemma3
from drawloom.components.model.glm4_moe import Glm4Moe
from drawloom.components.model.glm4_moe_lite import Glm4MoeLite
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.granite import Granite
from drawloom.components.model.llama import Llama
from drawloom.components.model.mistral import Mistral
from drawloom.components.model.olmo2 import Olmo2
from drawloom.components.model.olmo3 import Olmo3
from drawloom.components.model.phi3 import Phi3
from drawloom.components.model.qwen2 import Qwen2
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.model.qwen3_5_moe import Qwen35Moe
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.model.smollm3 import SmolLm3
from drawloom.components.model.split_vocabulary import NewTokens, find_new_tokens_fault
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.experts import ExpertKernels
from drawloom.components.ports.flops import ForwardFlops
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import open_and_check_folder
from drawloom.graph import UserError, component, setting, wired
from drawloom.graph.recipe.lockfile import LOCK

FAMILIES: dict[str, type[DecoderBuilder]] = {
    model_type: kind
    for kind in (
        DeepseekV2,
        DeepseekV3,
        Dots1,
        Gemma3,
        Glm4Moe,
        Glm4MoeLite,
        GptOss,
        Granite,
        Llama,
        Mistral,
        Olmo2,
        Olmo3,
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
class AutoModel:
    """
    Model from a Hugging Face folder or a run's `export/`, which decides its family, sizes and initial weights.

    `[stages] weights` may replace the weights by others of the same sizes.
    """

    layers_keep_shapes: ClassVar[bool] = True

    kernels: ExpertKernels
    tokenizer: Tokenizer | None = wired(default=None)
    path: Path = setting(doc="folder with a config.json, and with safetensors files if `weights` is true")
    new_tokens: NewTokens = setting(
        default=0,
        check=find_new_tokens_fault,
        doc="number of the tokenizer's last ids with separate rows in embedding and head, in a parameter new_tokens, "
        "which the folder may lack; or a table from parameter names to numbers of ids, in the order of ids",
    )
    weights: bool = setting(
        default=True, impact="changes_training", doc="load the folder's weights; false for random weights"
    )

    def check_before_open(self) -> None:
        """Raise UserError for an invalid config, a folder without weights, or a tokenizer with too many ids."""
        try:
            self._check_path()
            _read_config(self.path)
            if self.weights and not any(self.path.glob("*.safetensors")):
                raise UserError(f"{self.path} has no safetensors files; write weights = false for random weights")
            if self.weights:
                _check_tensors_match_config(self.path, self.new_tokens)
            _ = self.builder.architecture  # last, so that an unreadable tokenizer does not hide other errors
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
        if (path / LOCK).is_file():
            raise UserError(f"{path} is a run folder; write its export, {path / 'export'}")
        if self.weights and path.is_file():
            raise UserError(f"{path} is a file, but weights are loaded from a folder; write {path.parent}")

    @classmethod
    def find_tensor_parallel_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        if node.settings["new_tokens"]:
            yield NEW_TOKENS_ARE_WHOLE
        with suppress(UserError):  # a problem of its own
            sizes = attrs.asdict(_read_config(node.settings["path"]), recurse=False)
            yield from find_tensor_parallel_faults(sizes, ranks)

    @classmethod
    def find_context_parallel_faults(cls, node: Any) -> Iterator[str]:
        with suppress(UserError):  # a problem of its own
            yield from find_context_parallel_faults(_read_config(node.settings["path"]).rope_scaling)

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        with suppress(UserError):  # a problem of its own
            return _find_builder_class(node.settings["path"]).family.has_classifier
        return True

    @classmethod
    def expert_count(cls, node: Any) -> int:
        with suppress(UserError):  # a problem of its own
            return num_experts(_read_config(node.settings["path"]))
        return 0

    @classmethod
    def build_meta_module(cls, node: Any) -> nn.Module | None:
        """Return the whole model on the meta device; None if the folder's config is invalid."""
        with suppress(UserError):  # a problem of its own
            return _create_builder_without_kernels(node.settings["path"], node.settings["new_tokens"]).build_on_meta()
        return None

    @cached_property
    def builder(self) -> DecoderBuilder:
        """The component of the folder's family, created on first use, because the tokenizer must be open."""
        kind = _find_builder_class(self.path)
        return kind(kernels=self.kernels, tokenizer=self.tokenizer, config=self.path, new_tokens=self.new_tokens)

    @property
    def initial_weights(self) -> Path | None:
        return self.path if self.weights else None

    def list_input_files(self) -> dict[str, list[Path]]:
        return {"path": [locate_config_json(self.path)]}

    @property
    def num_hidden_layers(self) -> int:
        return self.builder.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.builder.vocab_size

    @property
    def max_sequence_length(self) -> int:
        return self.builder.max_sequence_length

    def build(self, span: LayerRange) -> nn.Module:
        return self.builder.build(span)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return self.builder.blocks(module)

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        self.builder.initialize_parameter(name, parameter, seed, tensor_slice)

    def forward_flops(self) -> ForwardFlops:
        return self.builder.forward_flops()

    def hugging_face_config(self) -> dict[str, Any]:
        return self.builder.hugging_face_config()

    def build_updated_folder_config(self, path: Path, text_only: bool = False) -> dict[str, Any]:
        return self.builder.build_updated_folder_config(path, text_only)

    def find_decoder_prefix(self, path: Path) -> str:
        return self.builder.find_decoder_prefix(path)

    def hugging_face_mapper(self) -> Mapper:
        return self.builder.hugging_face_mapper()


def _check_tensors_match_config(path: Path, new_tokens: NewTokens) -> None:
    """Raise UserError if names or shapes of a folder's tensors do not match its config."""
    builder = _create_builder_without_kernels(path, new_tokens)
    open_and_check_folder(path, builder.build_on_meta(), builder.hugging_face_mapper().inverse())


def _create_builder_without_kernels(path: Path, new_tokens: NewTokens) -> DecoderBuilder:
    """Create the builder for a folder's family; it knows shapes, but its modules can't run a forward pass."""
    kernels: Any = None  # only a forward pass needs kernels
    return _find_builder_class(path)(kernels=kernels, config=path, new_tokens=new_tokens)


def _read_config(path: Path) -> DecoderConfig:
    """Read a folder's config. Raises UserError for an unknown family, or one that can't be built."""
    return read_config(_find_builder_class(path).family, path)


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
