"""The component `model.auto`: a model as a Hugging Face folder has it, of whichever family."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import tensor_faults
from drawloom.components.model.decoder.hugging_face import config_path, read_config, read_json
from drawloom.components.model.llama import Llama
from drawloom.components.model.mistral import Mistral
from drawloom.components.model.qwen2 import Qwen2
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.model import ExpertKernels, LayerRange
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.graph import Problem, UserError, component, setting

FAMILIES: dict[str, type[DecoderBuilder]] = {
    kind.family.model_type: kind for kind in (Llama, Mistral, Qwen2, Qwen3Dense, Qwen3Moe)
}
"""The components of all families, by `model_type`."""


@component(impact="incompatible")
class AutoModel:
    """
    The model of a Hugging Face folder, or of a run's `export/`: its family, its sizes and, for stages, its weights.

    `[stages] weights` may name other weights of the same sizes.
    """

    kernels: ExpertKernels
    tokenizer: Tokenizer | None = None
    path: Path = setting(doc="a folder with a config.json, and with safetensors files if its weights are to be loaded")
    weights: bool = setting(
        default=True, impact="changes_training", doc="start from the folder's weights; false for random ones"
    )

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """A config that can't be built, or a folder that has no weights to start from."""
        path: Path = node.settings["path"]
        try:
            read_config(_family(path).family, path)
        except UserError as error:
            why, _, instead = str(error).removeprefix("config: ").rpartition("; ")
            yield node.problem("path", why, instead)
            return
        if node.settings["weights"] and not any(path.glob("*.safetensors")):
            yield node.problem("path", f"{path} has no safetensors files", "write weights = false for random weights")

    @classmethod
    def tensor_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Why so many ranks along `tensor` can't share the model."""
        with suppress(UserError):  # a problem of its own
            path = node.settings["path"]
            yield from tensor_faults(attrs.asdict(read_config(_family(path).family, path), recurse=False), ranks)

    @cached_property
    def builder(self) -> DecoderBuilder:
        """The component of the folder's family. Computed on first use, because the tokenizer must be open."""
        return _family(self.path)(kernels=self.kernels, tokenizer=self.tokenizer, config=self.path)

    @property
    def initial_weights(self) -> Path | None:
        """The folder of the weights to start from, if stages name no others."""
        return self.path if self.weights else None

    def files_read(self) -> dict[str, list[Path]]:
        """The config.json."""
        return {"path": [config_path(self.path)]}

    @property
    def num_hidden_layers(self) -> int:
        return self.builder.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.builder.vocab_size

    def build(self, span: LayerRange) -> nn.Module:
        return self.builder.build(span)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return self.builder.blocks(module)

    def initialise(self, name: str, parameter: Tensor, seed: int, part_of: TensorSlice | None = None) -> None:
        """A function of seed, name and index alone, for parameters of any shape and slices of them."""
        self.builder.initialise(name, parameter, seed, part_of)

    def hugging_face_config(self) -> dict[str, Any]:
        return self.builder.hugging_face_config()

    def hugging_face_mapper(self) -> Mapper:
        return self.builder.hugging_face_mapper()


def _family(path: Path) -> type[DecoderBuilder]:
    """The component of the family of a `config.json`; UserError if it is of none."""
    file = config_path(path)
    kind = read_json(file).get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"config: {file} says model_type = {json.dumps(kind)}; take a model of one of {known}")
    return FAMILIES[kind]
