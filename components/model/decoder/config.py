"""
Decoder configs: keys of a `config.json`, also settings of recipes, and every layer's specification.

A family is a config with its differences from other families in files, declared by a component.
"""

import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from drawloom import above, between, setting
from drawloom.components.model.decoder.rope import BY_LENGTH, InvalidSetting, RopeScaling
from drawloom.components.model.decoder.specs import AttentionSpec, Branch, MixerSpec, MlpSpec, PartSpec, Rope, SwiGlu
from drawloom.ports import AttentionOptions, ConfigJson, Mapper, Settings

MAX_SIZES = {
    "num_hidden_layers": 10_000,  # ten times the deepest transformers; building many more would take hours
    "hidden_size": 10_000_000,
    "num_attention_heads": 100_000,
    "head_dim": 1_000_000,
    "intermediate_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
    "vocab_size": 2**31,  # token ids are int32
    "num_experts": 10_000,
    "taps": 64,
}
"""Upper bounds by kind of size: above all models' sizes, where checks alone would take minutes or gigabytes."""

Pairs = tuple[tuple[str, str], ...]
"""Keys in pairs."""

Norms = tuple[str | None, str | None]
"""Norm names before and after a module, or None."""


training_setting = partial(setting, impact="changes_training")
"""Declare a setting that a run may change, with another result."""


def size_setting(kind: str, doc: str, least: int = 1, **options: Any) -> Any:
    """Declare a size, from `least` to the entry for its kind in MAX_SIZES."""
    return setting(doc, check=between(least, MAX_SIZES[kind] + 1), **options)


@attrs.frozen(kw_only=True, slots=False)
class DecoderConfig:
    """
    Decoder config; sizes count channels, heads, layers or token ids.

    Every field is a key in `config.json`, declared once: a recipe's setting with this type, check and documentation,
    whose values in files are checked likewise. A family's own class may declare keys, change the defaults of inherited
    ones (`rope_theta: float = 5e5`), and override the class variables and methods that choose the layers' mechanisms.
    Specifications take fields with the names of keys or class variables from them (`PartSpec.from_config`). A subclass
    is an attrs class without a decorator.
    """

    qk_norm: ClassVar[Literal["none", "head", "projection"]] = "none"
    """RMSNorm of queries and keys: by head, or over the whole projection."""

    use_qk_norm = True
    """Whether queries and keys have the norms."""

    attention_score_scale: ClassVar[float | None] = None
    """The factor by which attention scores are multiplied; None: head_dim ** -0.5."""

    norms: ClassVar[tuple[Norms, Norms]] = ("input_layernorm", None), ("post_attention_layernorm", None)
    """Norm names before and after a layer's mixer, then around its feed-forward network."""

    zero_centered: ClassVar[bool] = False
    """Whether norms multiply by 1 + weight."""

    activation = SwiGlu()
    """Activation in feed-forward networks and experts."""

    unused_keys: ClassVar[tuple[str, ...]] = ()
    """Inherited keys that the family does not have: such as `rope_theta`; without it layers have no positions."""

    multiples: ClassVar[Pairs] = ()
    """Pairs of keys; a value of the first is divisible by that of the second."""

    maxima: ClassVar[Pairs] = ()
    """Pairs of keys; the first one's value is at most the second one's."""

    periods: ClassVar[Mapping[str, tuple[str, Any, Any]]] = {}
    """
    Lists by layer that files may leave out: the period's key in files, the usual item, and the item for the last layer
    in a period.
    """

    can_tie: ClassVar[bool] = True
    """Whether transformers can tie the head to the embedding."""

    layer_class: ClassVar[str] = "layer:Block"
    """The layers' module and class."""

    decoder_class: ClassVar[str] = "model:Decoder"
    """The module and class for layers with their embedding."""

    model_class: ClassVar[str] = "model:CausalLM"
    """The causal model's module and class."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys in files, by ours."""

    image_keys: ClassVar[tuple[str, ...]] = ()
    """Keys in `rope_parameters` for positions in images, ignored for text."""

    zero_is_null: ClassVar[tuple[str, ...]] = ()
    """Keys that are null in files where they are 0 in recipes, which have no null."""

    stacks_experts: ClassVar[bool] = False
    """Whether files have a layer's experts in one tensor, as the model has."""

    unread_tensors: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) for tensors in files without a parameter in the model."""

    joins: ClassVar[tuple[Any, ...]] = ()
    """Tensors that files join, each a `mapper.Join`."""

    joins_of_modules: ClassVar[tuple[Any, ...]] = ()
    """Tensors that transformers' modules join, unless it is what files join."""

    inserted_dims: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Where files insert dimensions with size 1, one after another, by a parameter's last name."""

    renamed_tensors: ClassVar[Mapping[str, str]] = {}
    """Regular expressions, replaced one after another in the names of tensors in files."""

    renamed_modules: ClassVar[Mapping[str, str]] = {}
    """Regular expressions, replaced in names in files where transformers names its modules otherwise."""

    # Class variables that a family may declare as keys.
    residual_multiplier = 1.0
    """Factor of outputs that are added to the residual stream."""

    embedding_multiplier = 1.0
    """Embedding factor."""

    rounds_embedding_multiplier = False
    """Whether the embedding factor is rounded to the embeddings' dtype."""

    logit_multiplier = 1.0
    """Logit factor."""

    partial_rotary_factor = 1.0
    """Part of the channels of a head that rotary positions rotate."""

    rope_interleave = False
    """Whether adjacent channels are rotated in pairs, instead of channels from both halves."""

    attention_bias = False
    """Whether the linear layers of attention have biases."""

    mlp_bias = False
    """Whether the linear layers of feed-forward networks have biases."""

    attention_gate = False
    """Whether attention's output is multiplied by the sigmoid of a projection."""

    attention_sinks = False
    """Whether every head has a learned score for one more key, whose value is 0."""

    num_hidden_layers: int = size_setting("num_hidden_layers", "number of layers")
    hidden_size: int = size_setting("hidden_size", "width of the hidden states")
    num_attention_heads: int = size_setting("num_attention_heads", "number of query heads")
    num_key_value_heads: int = size_setting(
        "num_attention_heads", "number of key and value heads; default: num_attention_heads"
    )
    head_dim: int = size_setting("head_dim", "width of a head; default: hidden_size / num_attention_heads")
    intermediate_size: int = size_setting("intermediate_size", "inner width of the feed-forward network")
    vocab_size: int = size_setting("vocab_size", "number of token ids; default: the tokenizer's")
    tie_word_embeddings: bool = setting("use the embedding's weight for the head", default=False)
    max_position_embeddings: int = size_setting(
        "max_position_embeddings", "maximum sequence length in an export", default=32_768, impact="safe"
    )
    rope_theta: float = training_setting("base of rotary positions", default=1e6, check=above(1))
    rope_scaling: RopeScaling | None = training_setting(
        "scaling of rotary positions for longer texts; default: none", default=None
    )
    rms_norm_eps: float = training_setting("constant added to mean squares in norms", default=1e-6, check=above(0))
    initializer_range: float = training_setting("standard deviation of initial weights", default=0.02, check=above(0))

    def __init_subclass__(cls) -> None:
        """Make a family's class an attrs class; without slots, as some families inherit from two configs."""
        super().__init_subclass__()
        attrs.frozen(kw_only=True, slots=False)(cls)

    @property
    def max_sequence_length(self) -> int:
        """The maximum sequence length for rotary positions: max_position_embeddings, or more if they are scaled."""
        if self.rope_scaling is None or self.rope_scaling.factor is None:
            return self.max_position_embeddings
        # Files of Llama 3 have the extended length as max_position_embeddings, files of Qwen the original one.
        original = self.rope_scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope_scaling.factor * original))

    @property
    def output_bias(self) -> bool:
        """Whether the linear layer after attention has a bias."""
        return self.attention_bias

    @property
    def rotary_dim(self) -> int:
        """The number of rotated channels in a head."""
        return int(self.head_dim * self.partial_rotary_factor)

    def map_experts(self, name: str) -> Mapper | None:
        """Return the mapper for an experts' parameter that files have in another form, or None."""
        return None

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """
        Convert a `config.json` to this class's keys, before defaults are filled in.

        Values have the types of the keys, or those in `hugging_face.READ_TYPES`.
        Raises ValueError, with a reason that follows the path, for a config that can't be built.
        """
        return config

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert a complete `config.json` with this class's keys to its form in files."""
        return config

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token attends to in a layer, itself included; None: all before it."""
        return None

    def rope_of(self, layer: int) -> Rope | None:
        """Return a layer's rotary positions; None: it has none."""
        if "rope_theta" in self.unused_keys:
            return None
        scaling: Any = None
        if self.rope_scaling is not None:
            from drawloom.components.model.decoder.rope_scaling import convert_to_kernel_scaling

            scaling = convert_to_kernel_scaling(self.rope_scaling, self.max_position_embeddings)
        return Rope(self.rotary_dim, self.rope_theta, scaling, self.rope_interleave)

    def mixer_spec_of(self, layer: int) -> MixerSpec:
        """Return the specification for a layer's attention: here with grouped queries."""
        return AttentionSpec.from_config(
            self,
            rope=self.rope_of(layer),
            window=self.window_of(layer),
            qk_norm=self.qk_norm if self.use_qk_norm else "none",
            options=AttentionOptions(scale=self.attention_score_scale),
        )

    def mlp_spec_of(self, layer: int) -> PartSpec:
        """Return the specification for a layer's feed-forward network or experts."""
        return MlpSpec.from_config(self, width=self.intermediate_size)

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        """Return the name and the specification of the module in a layer's first branch: here attention."""
        return "self_attn", self.mixer_spec_of(layer)

    def norms_of(self, layer: int) -> tuple[Norms, Norms]:
        """Return a layer's `norms`."""
        return self.norms

    def branches_of(self, layer: int) -> Sequence[Branch]:
        """Return a layer's branches, in order: here a mixer and a feed-forward network."""
        name, mixer = self.mixer_of(layer)
        (before, after), (before_mlp, after_mlp) = self.norms_of(layer)
        return (
            Branch(before, name, mixer, after),
            Branch(before_mlp, "mlp", self.mlp_spec_of(layer), after_mlp),
        )

    @property
    def branch_count(self) -> int:
        """The number of outputs added to the residual stream."""
        return sum(len(self.branches_of(layer)) for layer in range(self.num_hidden_layers))

    @classmethod
    def find_split_faults(cls, sizes: Settings, dimension: str, ranks: int) -> Iterator[str]:
        """Yield reasons why ranks along a mesh's dimension can't split a model with these sizes; see `SplitModel`."""
        if dimension == "context" and (rope := sizes.get("rope_scaling")) and rope.rope_type in BY_LENGTH:
            yield f"{rope.rope_type} positions depend on the length of whole rows"
        if dimension != "tensor":
            return
        for key in (
            *(("hidden_size",) if "conv_L_cache" in sizes else ()),
            *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "linear_num_key_heads"),
            *("linear_num_heads", "n_groups", "intermediate_size", "moe_shared_expert_intermediate_size"),
        ):
            if (size := sizes.get(key)) and size % ranks:
                yield f"{key} = {size} is not divisible by {ranks}"
        if (size := sizes.get("vocab_size")) and size < ranks:
            yield f"vocab_size = {size} is less than {ranks}"
        if "n_shared_experts" in sizes and (inner := sizes.get("moe_intermediate_size")):
            experts = sizes["n_shared_experts"] or 1
            if experts * inner % ranks:
                yield f"n_shared_experts × moe_intermediate_size = {experts * inner} is not divisible by {ranks}"

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """
        Yield the faults in keys only this family has.

        `given` has all keys, except those whose default depends on the layers or on the tokenizer.
        """
        layers = given["num_hidden_layers"]
        for key, items in (("layer_types", "types"), ("indexer_types", "types"), ("no_rope_layers", "numbers")):
            if key not in cls.unused_keys and (count := len(given.get(key, range(layers)))) < layers:
                why = f"{key} has {count} {items}, and num_hidden_layers = {layers}"
                yield InvalidSetting(key, why, f"write {layers} {items}, or leave {key} out")
        for key, other in cls.multiples:
            if given[key] % (unit := given[other]):
                why = f"{key} = {given[key]} is not divisible by {other} = {unit}"
                yield InvalidSetting(key, why, f"write {unit}, or a multiple of it")
        for key, other in cls.maxima:
            if given[key] > (most := given[other]):
                why = f"{key} = {given[key]} is more than {other} = {most}"
                yield InvalidSetting(key, why, f"write {most}, or less")
        if given.get("tie_word_embeddings") and not cls.can_tie:
            why = "models of this family have a head of their own, and transformers can't read a tied one"
            yield InvalidSetting("tie_word_embeddings", why, "write false")
        factor = given.get("partial_rotary_factor", 1.0)
        channels = int(given["head_dim"] * factor)
        if factor != 1 and (channels < 2 or channels % 2):
            why = f"partial_rotary_factor = {factor} rotates {channels} channels of head_dim = {given['head_dim']}"
            yield InvalidSetting("partial_rotary_factor", why, "write a factor that rotates pairs of channels")


def rotary_factor_setting(default: float) -> Any:
    """Declare `partial_rotary_factor`, from which `rotary_dim` follows."""
    return training_setting(
        "part of the channels of a head that rotary positions rotate", default=default, check=between(0.01, 1.001)
    )


def derive_head_sizes(given: Settings) -> dict[str, int]:
    """Return the defaults of head sizes that follow from the other sizes, if these are known."""
    width, heads = given.get("hidden_size"), given.get("num_attention_heads")
    return {"num_key_value_heads": heads, "head_dim": width // heads} if width and heads else {}


def find_head_count_faults(heads: int, kv_heads: int, head_dim: int) -> Iterator[InvalidSetting]:
    """Yield the faults if kv_heads does not divide heads, or head_dim is odd."""
    if heads % kv_heads:
        whole = [number for number in range(1, heads + 1) if heads % number == 0]
        why = f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        yield InvalidSetting("num_key_value_heads", why, f"write one of {', '.join(map(str, whole))}")
    if head_dim % 2:
        why = f"head_dim = {head_dim} is odd, and rotary positions rotate pairs of channels"
        yield InvalidSetting("head_dim", why, f"write {head_dim + 1}")


def find_size_faults(sizes: Settings) -> Iterator[InvalidSetting]:
    """Yield the faults in heads and rotary positions, as far as the sizes are known."""
    heads, head_dim, rotary_dim = sizes.get("num_attention_heads"), sizes.get("head_dim"), None
    if head_dim is not None:
        rotary_dim = int(head_dim * sizes.get("partial_rotary_factor", 1.0))
        if heads is not None:
            yield from find_head_count_faults(heads, sizes.get("num_key_value_heads", heads), head_dim)
    for key in ("rope_scaling", "rope_parameters"):
        if (rope := sizes.get(key)) is not None:
            from drawloom.components.model.decoder.rope_scaling import find_rope_faults

            yield from find_rope_faults(rope, rotary_dim, key)


COMMON_FIXED = {"attention_dropout": 0.0, "hidden_act": "silu"}
"""The `fixed` values of all families."""


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys for token ids: null, as transformers' defaults may lie outside the vocabulary."""


class Family:
    """Declarations in a family's component: its config class, and its keys in a `config.json`."""

    config_type: ClassVar[type[DecoderConfig]]
    """The config class."""

    model_type: ClassVar[str]
    """The `model_type` in files."""

    class_name: ClassVar[str]
    """The class in transformers."""

    hf_defaults: ClassVar[Settings] = {}
    """transformers' defaults for a config's keys, where they differ from ours."""

    fixed: ClassVar[Settings] = {}
    """Values that a config must have for a model to be built, and gets when it is written."""

    derives_head_dim: ClassVar[bool] = True
    """Whether a config may leave out head sizes without a default."""

    other_types: ClassVar[tuple[str, ...]] = ()
    """Further names in files for `model_type`."""

    nested_types: ClassVar[Mapping[str, str]] = {}
    """
    Types of multimodal models with such a config as `text_config`, and the decoder's prefix in the model that
    transformers builds for causal language modeling.
    """

    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) for tensors that are not loaded."""

    has_classifier: ClassVar[bool] = True
    """Whether transformers has a sequence classifier for `model_type`."""

    keys: ClassVar["dict[str, attrs.Attribute[Any]]"]
    """The config's fields without `unused_keys`: the keys of a `config.json`, and the settings with their names."""

    required_keys: ClassVar[list[str]]
    """The keys without a default."""

    key_defaults: ClassVar[ConfigJson]
    """The keys' defaults, except those that depend on other keys or on the tokenizer."""

    def __init_subclass__(cls) -> None:
        """Read a family's keys; a field that changes a default has the check and documentation it inherits."""
        super().__init_subclass__()
        if "config_type" not in vars(cls):
            return
        config = cls.config_type
        hints, fields = typing.get_type_hints(config), attrs.fields(config)
        bases = [base for base in reversed(config.__mro__) if attrs.has(base)]
        parents = [field for base in bases for field in attrs.fields(base) if not field.inherited]
        declared = {field.name: field for field in parents if "doc" in field.metadata}
        if undeclared := [field.name for field in fields if field.name not in declared]:
            why = "has no documentation; declare it by setting(..., doc=...)"
            raise TypeError(f"{config.__name__}.{undeclared[0]} {why}")
        cls.keys = {
            field.name: field.evolve(type=hints[field.name], metadata=declared[field.name].metadata)
            for field in fields
            if field.name not in config.unused_keys
        }
        defaults = {key: field.default for key, field in cls.keys.items()}
        cls.required_keys = [key for key, default in defaults.items() if default is attrs.NOTHING]
        cls.key_defaults = {key: value for key, value in defaults.items() if isinstance(value, int | float | None)}

    @classmethod
    def build_config(cls, architecture: DecoderConfig) -> ConfigJson:
        """Return the `config.json` for a model; an export fills in the token ids."""
        # Rotary scaling has another form in files.
        values = {key: getattr(architecture, key) for key in cls.keys if key != "rope_scaling"}
        values |= {key: values[key] or None for key in cls.config_type.zero_is_null}
        numbers = {cls.config_type.renamed.get(key, key): value for key, value in values.items()}
        named = {"architectures": [cls.class_name], "model_type": cls.model_type}
        rope: ConfigJson = {}
        if architecture.rope_scaling is not None:
            from drawloom.components.model.decoder.rope_scaling import build_rope_parameters

            rope = build_rope_parameters(architecture.rope_scaling, architecture.rope_theta, architecture.rotary_dim)
        no_ids = dict.fromkeys(TOKEN_IDS)
        fixed = {**COMMON_FIXED, **cls.fixed}
        return cls.config_type.write_keys({**named, **fixed, **numbers, **rope, **no_ids, "use_cache": True})
