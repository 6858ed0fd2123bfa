"""The settings that all families share, the modules that they build, and initial weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.components.model.decoder.config import (
    DecoderConfig,
    create_size_check,
    find_tensor_parallel_faults,
)
from drawloom.components.model.decoder.hugging_face import (
    Family,
    build_hugging_face_config,
    build_updated_folder_config,
    locate_config_json,
    read_config,
    read_config_json,
)
from drawloom.components.model.decoder.rope import BY_LENGTH, RopeScaling, find_context_parallel_faults
from drawloom.components.model.decoder.settings import build_architecture_from_settings, find_setting_faults
from drawloom.components.model.new_tokens import (
    NewTokens,
    NewTokenSplit,
    count_new_rows,
    count_new_tokens,
    find_new_tokens_fault,
)
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.flops import ForwardFlops
from drawloom.components.ports.model import Kernels, LayerRange
from drawloom.components.ports.parameter_roles import Role, default_role, parameter_roles
from drawloom.components.ports.parametrization import ModelScaling
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.convert import persistent_tensors
from drawloom.components.weights.mapper import sequential
from drawloom.graph import Problem, UserError, component_base_class, setting, wired
from drawloom.graph.toml.emit import dump_toml

NEW_TOKENS_ARE_WHOLE = "the rows of new tokens can't be shared"


def fill_with_initial_weights(
    name: str,
    parameter: Tensor,
    role: Role,
    *,
    seed: int,
    layers: int,
    std: float,
    tensor_slice: TensorSlice | None = None,
) -> None:
    """
    Fill a parameter (any shape, any floating-point dtype), or its slice `tensor_slice`, in place by its role.

    Normal random numbers have the standard deviation `std`, times the role's scaling. The outputs of 2 * layers
    matrices are added to the residual stream; their standard deviation is divided by sqrt(2 * layers), so that the
    stream does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Random numbers depend on the seed, the
    name and the element's index only; they are drawn in float32 and rounded to the dtype.
    """
    if isinstance(role.initial, float):
        with torch.no_grad():
            parameter.fill_(role.initial)
        return
    # Each layer adds two outputs to the stream: attention's and the feed-forward network's.
    std *= role.scaling.initial_std
    if role.is_residual:
        std /= math.sqrt(2 * layers)
    scale = std if role.initial == "normal" else 1.0
    part = tensor_slice or TensorSlice.whole(tuple(parameter.shape))
    fill_normal(parameter, derive_seed(seed, "initial weights", name), scale, part.shape, part.offsets)
    if callable(role.initial):
        with torch.no_grad():
            parameter.copy_(role.initial(torch.special.ndtr(parameter.double())))


@component_base_class
class DecoderModel:
    """Model of a decoder: its modules, initial weights and files follow from its family and its config."""

    layers_keep_shapes: ClassVar[bool] = True

    kernels: Kernels
    tokenizer: Tokenizer | None = wired(default=None)
    new_tokens: NewTokens = setting(
        default=0,
        check=find_new_tokens_fault,
        doc="number of the tokenizer's last ids with separate rows in embedding and head, in a parameter new_tokens, "
        "which a folder may lack; or a table from parameter names to numbers of ids, in the order of ids",
    )

    @classmethod
    def read_sizes(cls, node: Any) -> Mapping[str, Any]:
        """Return the config's keys, as far as `check` knows them; empty if a file is invalid, a problem of its own."""
        raise NotImplementedError

    @property
    def family(self) -> Family:
        """The family, whose config is built."""
        raise NotImplementedError

    @property
    def config_settings(self) -> Mapping[str, Any]:
        """The settings of the config, by key; None for those that are left out."""
        raise NotImplementedError

    def build_architecture(self) -> DecoderConfig:
        """Return the config for the settings and the tokenizer's size. Raises UserError for invalid settings."""
        tokens = None if self.tokenizer is None else self.tokenizer.vocab_size
        return build_architecture_from_settings(
            self.family, self.config_settings, tokens, count_new_tokens(self.new_tokens)
        )

    @classmethod
    def find_tensor_parallel_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        if node.settings["new_tokens"]:
            yield NEW_TOKENS_ARE_WHOLE
        yield from find_tensor_parallel_faults(cls.read_sizes(node), ranks)

    @classmethod
    def find_context_parallel_faults(cls, node: Any) -> Iterator[str]:
        rope = node.settings.get("rope_parameters") or node.settings.get("rope_scaling")
        yield from find_context_parallel_faults(rope or cls.read_sizes(node).get("rope_scaling"))

    @classmethod
    def expert_count(cls, node: Any) -> int:
        return node.settings.get("num_experts") or cls.read_sizes(node).get("num_experts") or 0

    @classmethod
    def build_meta_module(cls, node: Any) -> nn.Module | None:
        # Only shapes depend on the vocabulary, which an open tokenizer knows, and only a forward pass takes kernels.
        settings: dict[str, Any] = {**node.settings, "kernels": None}
        if settings.get("config", True) is None and settings["vocab_size"] is None:
            settings["vocab_size"] = 1
        with suppress(UserError):  # a problem of its own
            return cls(**settings).build_on_meta()
        return None

    @cached_property
    def architecture(self) -> DecoderConfig:
        """The config, computed on first use, because the tokenizer reads a file."""
        return self.build_architecture()

    @property
    def scaling(self) -> ModelScaling:
        """Factors for initial values and the optimizer's options; all are 1 without a parametrization."""
        return ModelScaling()

    @property
    def new_token_split(self) -> NewTokenSplit | None:
        """The vocabulary's split into a table and new tokens: the tokenizer's last ids, or ids after the table."""
        if not self.new_tokens:
            return None
        rows, count = self.architecture.vocab_size, count_new_tokens(self.new_tokens)
        end = rows + count if self.tokenizer is None else self.tokenizer.vocab_size
        return NewTokenSplit(end - count, count_new_rows(self.new_tokens), rows)

    @property
    def num_hidden_layers(self) -> int:
        return self.architecture.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size if self.new_token_split is None else self.new_token_split.id_count

    @property
    def max_sequence_length(self) -> int:
        return self.architecture.max_sequence_length

    def build(self, span: LayerRange) -> nn.Module:
        from drawloom.components.model.decoder.model import CausalLM, set_joined_layer_names

        module = CausalLM(self.architecture, span, self.kernels, self.scaling)
        set_joined_layer_names(module, self.family.mapper, self.architecture)
        if self.new_token_split is None:
            return module
        from drawloom.components.model.split_vocabulary import replace_by_split_layers

        return replace_by_split_layers(module, self.new_token_split)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        from drawloom.components.model.decoder.layer import Block

        return [part for part in module.modules() if isinstance(part, Block)]

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        std, layers = self.architecture.initializer_range, self.architecture.num_hidden_layers
        role = self._roles_by_parameter_name.get(name) or default_role(name, parameter)
        fill_with_initial_weights(name, parameter, role, seed=seed, layers=layers, std=std, tensor_slice=tensor_slice)

    def forward_flops(self) -> ForwardFlops:
        from drawloom.components.model.decoder.model import count_forward_flops

        return count_forward_flops(self.build_on_meta(), self.architecture)

    def hugging_face_config(self) -> dict[str, Any]:
        written = attrs.evolve(self.architecture, vocab_size=self.vocab_size)
        return build_hugging_face_config(self.family, written)

    def build_updated_folder_config(self, path: Path, text_only: bool = False) -> dict[str, Any]:
        written = attrs.evolve(self.architecture, vocab_size=self.vocab_size)
        return build_updated_folder_config(self.family, path, written, text_only)

    def find_decoder_prefix(self, path: Path) -> str:
        return self.family.nested_types.get(str(read_config_json(path).get("model_type")), "model.")

    def hugging_face_mapper(self) -> Mapper:
        names, joined = [*persistent_tensors(self.build_on_meta())], Mapper(())
        if self.new_token_split is not None:
            from drawloom.components.model.split_vocabulary import create_vocabulary_join_mapper

            joined = create_vocabulary_join_mapper(names, self.new_token_split)
        kept = [name for name in names if name not in joined.inputs or name in joined.outputs]
        mapper = sequential(joined, self.family.mapper(kept, self.architecture))
        layers = str(self.num_hidden_layers)
        return attrs.evolve(mapper, ignored=tuple(p.replace("{layers}", layers) for p in self.family.ignored))

    @cached_property
    def _roles_by_parameter_name(self) -> dict[str, Role]:
        return dict(parameter_roles(self.build_on_meta()))

    def build_on_meta(self) -> nn.Module:
        """Build the whole model on the meta device, where nothing is allocated."""
        with torch.device("meta"):
            return self.build(LayerRange(0, self.num_hidden_layers, embedding=True, head=True))


@component_base_class
class DecoderBuilder(DecoderModel):
    """Model of a family, with sizes from settings or from a Hugging Face `config.json`."""

    family: ClassVar[Family]

    config: Path | None = setting(
        default=None, doc="Hugging Face config.json, or its folder; other settings replace its values"
    )
    vocabulary_multiple: int = setting(
        default=1,
        check=create_size_check("vocab_size"),
        doc="the tokenizer's vocabulary size is rounded up to a multiple of this",
    )
    rope_parameters: RopeScaling | None = setting(
        default=None,
        impact="changes_training",
        doc="rope_theta and rope_scaling in one table, as in transformers 5",
    )

    def __init_subclass__(cls) -> None:
        """Declare a setting for every key of the family's config; None stands for the file's value or the default."""
        super().__init_subclass__()
        if "family" not in vars(cls):
            return
        kind: Any
        for key, field in cls.family.keys.items():
            default, doc = cls.family.constants.get(key), field.metadata["doc"]
            if default is not None:
                doc += f"; default: {f'{default:g}' if isinstance(default, float) else dump_toml(default)}"
            # Some keys are also properties of the built model.
            name = f"_{key}" if hasattr(cls, key) else key
            setattr(cls, name, setting(default=None, alias=key, **{**field.metadata, "doc": doc}))
            kind = field.type
            cls.__annotations__[name] = kind | None

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Yield problems with settings that are missing or contradict one another."""
        for fault in find_setting_faults(cls.family, node.settings, node.neighbour("tokenizer") is not None):
            yield node.problem(fault.key, fault.why, fault.instead)

    @classmethod
    def read_sizes(cls, node: Any) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = node.settings
        with suppress(UserError):
            if settings["config"] is not None:
                return attrs.asdict(read_config(cls.family, settings["config"]), recurse=False)
            return settings
        return {}

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        return cls.family.has_classifier

    @classmethod
    def resume_impact(cls, node: Any, key: str, before: Any) -> str | None:
        """Return changes_training for max_position_embeddings if rotary positions depend on it, else None."""
        rope = node.settings["rope_parameters"] or node.settings["rope_scaling"]
        return "changes_training" if key == "max_position_embeddings" and rope and rope.rope_type in BY_LENGTH else None

    def check_before_open(self) -> None:
        """Raise UserError if the config can't be read or built, or the tokenizer has more ids than the vocabulary."""
        _ = self.architecture

    @property
    def config_settings(self) -> Mapping[str, Any]:
        cls: Any = type(self)
        return {field.alias: getattr(self, field.name) for field in attrs.fields(cls)}

    def list_input_files(self) -> dict[str, list[Path]]:
        if self.config is None:
            return {}
        return {"config": [locate_config_json(self.config)]}
