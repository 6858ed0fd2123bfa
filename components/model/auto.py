"""The component `model.auto`: a model as a Hugging Face folder has it, of whichever family."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.builder import NEW_TOKENS_ARE_WHOLE, DecoderBuilder
from drawloom.components.model.decoder.config import num_experts, tensor_faults
from drawloom.components.model.decoder.hugging_face import config_path, read_config, read_json
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.llama import Llama
from drawloom.components.model.mistral import Mistral
from drawloom.components.model.qwen2 import Qwen2
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.model.split_vocabulary import NewTokens, fault_of_new_tokens
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.experts import ExpertKernels
from drawloom.components.ports.flops import ForwardFlops
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import fitting_folder
from drawloom.graph import UserError, component, setting, wired
from drawloom.graph.recipe.lockfile import LOCK

FAMILIES: dict[str, type[DecoderBuilder]] = {
    kind.family.model_type: kind for kind in (Dots1, Llama, Mistral, Qwen2, Qwen3Dense, Qwen3Moe)
}
"""The components of all families, by `model_type`."""


@component(impact="incompatible")
class AutoModel:
    """
    The model of a Hugging Face folder, or of a run's `export/`: its family, its sizes and, for stages, its weights.

    `[stages] weights` may name other weights of the same sizes.
    """

    layers_keep_shapes: ClassVar[bool] = True

    kernels: ExpertKernels
    tokenizer: Tokenizer | None = wired(default=None)
    path: Path = setting(doc="a folder with a config.json, and with safetensors files if its weights are to be loaded")
    new_tokens: NewTokens = setting(
        default=0,
        check=fault_of_new_tokens,
        doc="how many of the tokenizer's last ids have rows of their own in embedding and head, called new_tokens, "
        "which the folder need not have; or, for several such splits, a table of names and numbers in the order of ids",
    )
    weights: bool = setting(
        default=True, impact="changes_training", doc="start from the folder's weights; false for random ones"
    )

    def check_machine(self) -> None:
        """Raise UserError for a config that can't be built, a folder without weights, or a tokenizer of more ids."""
        try:
            self._check_path()
            read_config(_family(self.path).family, self.path)
            if self.weights and not any(self.path.glob("*.safetensors")):
                raise UserError(f"{self.path} has no safetensors files; write weights = false for random weights")
            if self.weights:
                _check_weights(self.path, self.new_tokens)
            _ = self.builder.architecture  # last: the tokenizer may be what can't be read
        except UserError as error:
            raise UserError(f"path: {str(error).removeprefix('config: ')}") from error

    def _check_path(self) -> None:
        path = self.path
        if not path.exists():
            # An absolute path, or one of several folders, is no name of a model on the hub.
            on_hub = len(path.parts) == 2 and not path.is_absolute()
            download = f", such as `hf download {path} --local-dir {path.name}` makes" if on_hub else ""
            raise UserError(f"there is no folder {path}; write one with a config.json{download}")
        if (path / LOCK).is_file():
            raise UserError(f"{path} is a run folder; write its export, {path / 'export'}")
        if self.weights and path.is_file():
            raise UserError(f"{path} is a file, and weights are in a folder; write {path.parent}")

    @classmethod
    def tensor_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Why this number of ranks along `tensor` can't share the model; nothing if they can."""
        if node.settings["new_tokens"]:
            yield NEW_TOKENS_ARE_WHOLE
        with suppress(UserError):  # a problem of its own
            path = node.settings["path"]
            yield from tensor_faults(attrs.asdict(read_config(_family(path).family, path), recurse=False), ranks)

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """The experts of a layer; 0 if the model has none."""
        with suppress(UserError):  # a problem of its own
            path = node.settings["path"]
            return num_experts(read_config(_family(path).family, path))
        return 0

    @classmethod
    def parameters_of(cls, node: Any) -> dict[str, nn.Parameter]:
        """All parameters by name, on the meta device; none if no model can be built of the folder's config."""
        with suppress(UserError):  # a problem of its own
            return _without_kernels(node.settings["path"], node.settings["new_tokens"]).whole_parameters()
        return {}

    @cached_property
    def builder(self) -> DecoderBuilder:
        """The component of the folder's family. Computed on first use, because the tokenizer must be open."""
        kind = _family(self.path)
        return kind(kernels=self.kernels, tokenizer=self.tokenizer, config=self.path, new_tokens=self.new_tokens)

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

    @property
    def longest_text(self) -> int:
        return self.builder.longest_text

    def build(self, span: LayerRange) -> nn.Module:
        return self.builder.build(span)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return self.builder.blocks(module)

    def initialise(self, name: str, parameter: Tensor, seed: int, part_of: TensorSlice | None = None) -> None:
        """A function of seed, name and index alone, for parameters of any shape and slices of them."""
        self.builder.initialise(name, parameter, seed, part_of)

    def forward_flops(self) -> ForwardFlops:
        """Floating-point operations of matrix products, by parameter, and of attention."""
        return self.builder.forward_flops()

    def hugging_face_config(self) -> dict[str, Any]:
        return self.builder.hugging_face_config()

    def hugging_face_mapper(self) -> Mapper:
        return self.builder.hugging_face_mapper()


def _check_weights(path: Path, new_tokens: NewTokens) -> None:
    """UserError if the tensors of a folder are not those of its config, by their names and shapes."""
    builder = _without_kernels(path, new_tokens)
    with torch.device("meta"):
        module = builder.build(LayerRange(0, builder.num_hidden_layers, embedding=True, head=True))
    fitting_folder(path, module, builder.hugging_face_mapper().inverse())


def _without_kernels(path: Path, new_tokens: NewTokens) -> DecoderBuilder:
    kernels: Any = None  # only a forward pass would use them
    return _family(path)(kernels=kernels, config=path, new_tokens=new_tokens)


def _family(path: Path) -> type[DecoderBuilder]:
    """The component of the family of a `config.json`; UserError if it is of none."""
    file = config_path(path)
    kind = read_json(file).get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"config: {file} says model_type = {json.dumps(kind)}; take a model of one of {known}, or add its "
            "family (docs/families.md)"
        )
    return FAMILIES[kind]
