"""The settings that all families share, the modules that they build, and initial weights."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import Problem, UserError, setting, wired
from drawloom.components.model.decoder.config import (
    DecoderConfig,
    Family,
    derive_head_sizes,
    find_size_faults,
    size_setting,
)
from drawloom.components.model.decoder.rope import (
    BY_LENGTH,
    InvalidSetting,
    RopeScaling,
    find_duplicate_rope_settings,
    separate_theta_and_scaling,
)
from drawloom.components.model.new_tokens import NewTokens, count_new_rows, count_new_tokens, find_new_tokens_fault
from drawloom.graph import component_base_class
from drawloom.graph.toml.emit import dump_toml
from drawloom.ports import (
    ConfigJson,
    ForwardFlops,
    Kernels,
    LayerRange,
    Mapper,
    ModelScaling,
    Parametrization,
    Role,
    Settings,
    TensorSlice,
    Tokenizer,
    default_role,
    parameter_roles,
)

if TYPE_CHECKING:
    from drawloom.components.model.split_vocabulary import NewTokenSplit

EXAMPLES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "layers": "3 x gdn, 1 x attention",
}


def find_setting_faults(family: type[Family], settings: Settings, has_tokenizer: bool) -> Iterator[InvalidSetting]:
    """Return problems in a recipe's settings; None stands for a setting left out."""
    given = _drop_unset_settings(family, settings)
    yield from find_duplicate_rope_settings(given)
    if settings["config"] is not None:
        return  # the file sets everything else, and may be on another machine
    derived = ("num_key_value_heads", "head_dim", "vocab_size")
    needed = [key for key in family.required_keys if key not in derived]
    if "moe_intermediate_size" in needed and "intermediate_size" in needed:
        needed.remove("intermediate_size")
    for key in needed:
        if key not in given:
            example = f"{key} = {dump_toml(EXAMPLES[key])}"
            yield InvalidSetting(key, f"{key} is missing", f"write {example}, for example, or config = a config.json")
    if "vocab_size" not in given and not has_tokenizer:
        instead = "add a [tokenizer], or write the number of its ids: vocab_size = 50304, for example"
        yield InvalidSetting("vocab_size", "there is neither a vocabulary nor a tokenizer to ask for it", instead)
    complete = family.key_defaults | derive_head_sizes(given) | given
    width, heads = given.get("hidden_size", 0), given.get("num_attention_heads", 1)
    if "head_dim" not in given and width % heads:
        why = f"num_attention_heads = {heads} does not divide hidden_size = {width}, so head_dim has no default"
        yield InvalidSetting("num_attention_heads", why, "write head_dim = 64, for example")
        yield from find_size_faults(given)
    else:
        yield from find_size_faults(complete)
    if given.keys() >= set(needed):
        yield from family.config_type.find_faults(complete)


def build_architecture_from_settings(
    family: type[Family], settings: Settings, tokens: int | None, new_tokens: int = 0
) -> DecoderConfig:
    """
    Return the architecture for these settings, with `tokens` ids in the tokenizer; the last ones may be new.

    Raises UserError for invalid settings.
    """
    for fault in find_setting_faults(family, settings, tokens is not None):
        raise UserError(f"{fault.key}: {fault.why}; {fault.instead}")
    if settings["config"] is not None:
        from drawloom.components.model.decoder.hugging_face import find_inconsistent_sizes

        architecture = _read_and_override_config(family, settings)
        for fault in find_inconsistent_sizes(architecture):
            raise UserError(f"{fault.key}: {fault.why}; {fault.instead}")
    else:
        try:
            architecture = family.config_type(**_fill_derived_defaults(family, settings, tokens))
        except ValueError as error:  # a derived default beyond its maximum
            raise UserError(f"{error}; write smaller sizes") from error
    if tokens is not None and tokens - new_tokens > (rows := architecture.vocab_size):
        why = f"the tokenizer has {tokens} ids, but the model's vocabulary only {rows}"
        added = f"new_tokens = {tokens - rows} for some that were added"
        key, instead = ("vocab_size", f"vocab_size = {tokens}") if settings["config"] is None else ("config", added)
        raise UserError(f"{key}: {why}; write {instead}, or another tokenizer")
    if tokens is not None and new_tokens >= tokens:
        raise UserError(
            f"new_tokens: {new_tokens} of the tokenizer's {tokens} ids can't all be added ones; write a smaller number"
        )
    return architecture


def _drop_unset_settings(family: type[Family], settings: Settings) -> dict[str, Any]:
    """Return the settings that are keys of the family's `config.json` and not None."""
    return {key: settings[key] for key in (*family.keys, "rope_parameters") if settings.get(key) is not None}


def _fill_derived_defaults(family: type[Family], settings: Settings, tokens: int | None) -> dict[str, Any]:
    """Add defaults derived from other settings or the tokenizer's size; the config class has constant defaults."""
    given = _drop_unset_settings(family, settings)
    if tokens is not None:
        # A vocabulary that 64 or 128 divides makes the head's matrix products faster on GPUs.
        multiple = settings["vocabulary_multiple"]
        given.setdefault("vocab_size", -(-tokens // multiple) * multiple)
    sizes = family.key_defaults | given
    if sizes.get("moe_intermediate_size"):
        # The size of layers without experts: if it was left out there are none, and only exports show it.
        given.setdefault("intermediate_size", sizes["num_experts_per_tok"] * sizes["moe_intermediate_size"])
    return derive_head_sizes(given) | separate_theta_and_scaling(given)


def _read_and_override_config(family: type[Family], settings: Settings) -> DecoderConfig:
    """Read the config file named in the settings, and override its values by the other settings."""
    given = _drop_unset_settings(family, settings)
    from drawloom.components.model.decoder.hugging_face import read_config

    scaling = {"rope_scaling": None} if given.keys() & {"rope_scaling", "rope_parameters"} else {}
    return attrs.evolve(read_config(family, settings["config"]), **scaling | separate_theta_and_scaling(given))


@component_base_class
class DecoderModel:
    """Model of a decoder: its modules, initial weights and files follow from its family and its config."""

    layers_keep_shapes: ClassVar[bool] = True

    kernels: Kernels
    tokenizer: Tokenizer | None = wired(default=None)
    new_tokens: NewTokens = setting(
        "number of the tokenizer's last ids with separate rows in embedding and head, in a parameter new_tokens, "
        "which a folder may lack; or a table from parameter names to numbers of ids, in the order of ids",
        default=0,
        check=find_new_tokens_fault,
    )

    @classmethod
    def find_family(cls, node: Any) -> type[Family] | None:
        """Return the family, or None if a file does not name one, a problem of its own."""
        return cls  # type: ignore[return-value]

    @classmethod
    def read_sizes(cls, node: Any) -> Settings:
        """Return the config's keys, as far as `check` knows them; empty if a file is invalid, a problem of its own."""
        raise NotImplementedError

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        family = cls.find_family(node)
        return family is None or family.has_classifier

    @property
    def family(self) -> type[Family]:
        """The family, whose config is built."""
        return type(self)  # type: ignore[return-value]

    @property
    def config_settings(self) -> Settings:
        """The settings of the config, by key; None for those that are left out."""
        raise NotImplementedError

    @classmethod
    def find_split_faults(cls, node: Any, dimension: str, ranks: int) -> Iterator[str]:
        if dimension == "tensor" and node.settings["new_tokens"]:
            yield "the rows of new tokens can't be shared"
        if (family := cls.find_family(node)) is not None:
            yield from family.config_type.find_split_faults(cls.read_sizes(node), dimension, ranks)

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
        """
        The config for the settings and the tokenizer's size, computed on first use, because the tokenizer reads a file.

        Raises UserError for invalid settings.
        """
        tokens = None if self.tokenizer is None else self.tokenizer.vocab_size
        return build_architecture_from_settings(
            self.family, self.config_settings, tokens, count_new_tokens(self.new_tokens)
        )

    @property
    def scaling(self) -> ModelScaling:
        """Factors for initial values and the optimizer's options; all are 1 without a parametrization."""
        return ModelScaling()

    @property
    def new_token_split(self) -> "NewTokenSplit | None":
        """The vocabulary's split into a table and new tokens: the tokenizer's last ids, or ids after the table."""
        if not self.new_tokens:
            return None
        rows, count = self.architecture.vocab_size, count_new_tokens(self.new_tokens)
        end = rows + count if self.tokenizer is None else self.tokenizer.vocab_size
        from drawloom.components.model.split_vocabulary import NewTokenSplit

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
        model_class = resolve_name(f"{__package__}.{self.architecture.model_class}")
        module = model_class(self.architecture, span, self.kernels, self.scaling)
        if self.new_token_split is None:
            return module  # type: ignore[no-any-return]
        return self.new_token_split.replace_layers(module)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        from drawloom.components.model.decoder.layer import Block

        return [part for part in module.modules() if isinstance(part, Block)]

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        from drawloom.components.model.decoder.initial_weights import fill_with_initial_weights

        # A layer has two branches, as a rule.
        std, layers = self.architecture.initializer_range, self.architecture.branch_count / 2
        role = self._roles_by_parameter_name.get(name) or default_role(name, parameter)
        fill_with_initial_weights(name, parameter, role, seed=seed, layers=layers, std=std, tensor_slice=tensor_slice)

    def forward_flops(self, span: LayerRange | None = None) -> ForwardFlops:
        from drawloom.components.model.decoder.model import count_forward_flops

        return count_forward_flops(self.build_on_meta(span), self.architecture)

    def hugging_face_config(self) -> ConfigJson:
        return self.family.build_config(attrs.evolve(self.architecture, vocab_size=self.vocab_size))

    def build_updated_folder_config(self, path: Path, text_only: bool = False) -> ConfigJson:
        from drawloom.components.model.decoder.hugging_face import build_updated_folder_config

        written = attrs.evolve(self.architecture, vocab_size=self.vocab_size)
        return build_updated_folder_config(self.family, path, written, text_only)

    def hugging_face_mapper(self) -> Mapper:
        mapper = self._map_parameters()
        return attrs.evolve(mapper, ignored=(*self.family.ignored, *self.architecture.unread_tensors))

    def transformers_mapper(self, folder: Path | None) -> Mapper:
        config = {}
        if folder is not None and (folder / "config.json").is_file():
            from drawloom.components.model.decoder.hugging_face import read_config_json

            config = read_config_json(folder / "config.json")
        return self._map_parameters(self.family.nested_types.get(str(config.get("model_type")), "model."))

    def _map_parameters(self, prefix: str | None = None) -> Mapper:
        """Return the mapper to files or, with the decoder's prefix, to transformers' modules."""
        from drawloom.components.model.decoder.mapper import create_decoder_mapper
        from drawloom.components.weights.load import persistent_tensors
        from drawloom.components.weights.mapper import sequential

        tensors, joined = persistent_tensors(self.build_on_meta()), Mapper(())
        if self.new_token_split is not None:
            joined = self.new_token_split.create_join_mapper(tensors)
        split = {*joined.inputs} - {*joined.outputs}
        kept = {name: tensor for name, tensor in tensors.items() if name not in split}
        return sequential(joined, create_decoder_mapper(kept, self.architecture, prefix))

    @cached_property
    def _roles_by_parameter_name(self) -> dict[str, Role]:
        return dict(parameter_roles(self.build_on_meta()))

    def build_on_meta(self, span: LayerRange | None = None) -> nn.Module:
        """Build a span, or the whole model, on the meta device, where nothing is allocated."""
        with torch.device("meta"):
            return self.build(span or LayerRange.of_whole_model(self.num_hidden_layers))


@component_base_class
class DecoderBuilder(DecoderModel, Family):
    """Model of a family, with sizes from settings or from a Hugging Face `config.json`."""

    config: Path | None = setting(
        "Hugging Face config.json, or its folder; other settings replace its values", default=None
    )
    vocabulary_multiple: int = size_setting(
        "vocab_size", "the tokenizer's vocabulary size is rounded up to a multiple of this", default=1
    )

    def __init_subclass__(cls) -> None:
        """Declare a setting for every key of the family's config; None stands for the file's value or the default."""
        super().__init_subclass__()
        if "config_type" not in vars(cls):
            return
        kind: Any
        if "rope_scaling" in cls.keys:
            doc = "rope_theta and rope_scaling in one table, as in transformers 5"
            setattr(cls, "rope_parameters", setting(doc, default=None, impact="changes_training"))  # noqa: B010
            cls.__annotations__["rope_parameters"] = RopeScaling | None
        for key, field in cls.keys.items():
            default, doc = cls.key_defaults.get(key), field.metadata["doc"]
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
        for fault in find_setting_faults(cls, node.settings, node.neighbour("tokenizer") is not None):
            yield node.problem(fault.key, fault.why, fault.instead)

    @classmethod
    def read_sizes(cls, node: Any) -> Settings:
        settings: Settings = node.settings
        with suppress(UserError):
            if settings["config"] is not None:
                return attrs.asdict(_read_and_override_config(cls, settings), recurse=False)
            given = separate_theta_and_scaling(_drop_unset_settings(cls, settings))
            return dict.fromkeys(cls.keys) | given
        return {}

    @classmethod
    def resume_impact(cls, node: Any, key: str, before: Any) -> str | None:
        """Return changes_training for max_position_embeddings if rotary positions depend on it, else None."""
        rope = node.settings.get("rope_parameters") or node.settings.get("rope_scaling")
        return "changes_training" if key == "max_position_embeddings" and rope and rope.rope_type in BY_LENGTH else None

    def check_before_open(self) -> None:
        """Raise UserError if the config can't be read or built, or the tokenizer has more ids than the vocabulary."""
        _ = self.architecture

    @property
    def config_settings(self) -> Settings:
        cls: Any = type(self)
        return {field.alias: getattr(self, field.name) for field in attrs.fields(cls)}

    def list_input_files(self) -> dict[str, list[Path]]:
        if self.config is None:
            return {}
        from drawloom.components.model.decoder.hugging_face import locate_config_json

        return {"config": [locate_config_json(self.config)]}


@component_base_class
class ParametrizedBuilder(DecoderBuilder):
    """
    Builder for a pre-norm decoder without experts, whose initial values and learning rates a parametrization may scale.

    Multipliers of residual outputs and logits are folded into weights, so an export needs no keys for them.
    """

    has_multipliers: ClassVar[bool] = False
    """Whether the family's config has multipliers of residual outputs and logits, which a tied head requires."""

    parametrization: Parametrization | None = None

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Yield the family's problems, and problems of a parametrization with a file's sizes or with a tied head."""
        yield from super().constraints(node)
        if node.neighbour("parametrization") is None:
            return
        if node.settings["config"] is not None:
            text = "a parametrization scales factors that the file may have scaled already"
            yield node.problem("config", text, "write the sizes in the recipe, or remove the parametrization")
        if node.settings["tie_word_embeddings"] and not cls.has_multipliers:
            text = f"a parametrization scales embedding and head differently, and {node.use} has no factor for logits"
            yield node.problem("tie_word_embeddings", text, "write false, or use = 'model.granite'")

    @property
    def scaling(self) -> ModelScaling:
        scaling = self.compute_scaling(self.architecture)
        return scaling if self.has_multipliers else scaling.fold_multipliers()

    def compute_scaling(self, config: DecoderConfig) -> ModelScaling:
        """Return the parametrization's factors for a config's sizes; all are 1 without a parametrization."""
        if self.parametrization is None:
            return ModelScaling()
        return self.parametrization.compute_scaling_for_size(config.hidden_size, config.num_hidden_layers)
