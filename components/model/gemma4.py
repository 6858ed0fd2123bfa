"""The component `model.gemma4`: Gemma 4 for text without per-layer embeddings, such as 31B (Gemma team 2026)."""

from collections.abc import Iterator

import attrs
from torch import Tensor

from drawloom import above, component, setting
from drawloom.components.model.decoder.declarations import (
    FULL,
    DecoderBuilder,
    Family,
    InvalidSetting,
    Rope,
    SlidingTypes,
    alternate_layer_types,
    config_class,
    find_head_count_faults,
    rotary_factor_setting,
    size_setting,
    training_setting,
)
from drawloom.components.model.decoder.hugging_face import join_rope_by_type, split_rope_by_type
from drawloom.components.model.decoder.mixer_specs import NormedValueSpec
from drawloom.components.model.gemma3 import GELU, SLIDING_THETA, GemmaConfig
from drawloom.ports import ConfigJson, Settings


@attrs.frozen
class FirstPairsRope(Rope):
    """Rotary positions of the first pairs in a head alone, at their frequencies if all were rotated."""

    pairs: int = attrs.field(kw_only=True)

    def compute_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().compute_cos_sin(positions)
        cos[..., self.pairs :], sin[..., self.pairs :] = 1.0, 0.0
        return cos, sin


@config_class
class Gemma4Config(GemmaConfig):
    """Config of Gemma 4: layers with full attention have other heads, whose keys may be the values, too."""

    unused_keys = ("rope_scaling",)
    layer_class = "scaled_layer:ScaledBlock"
    model_class = "capped_model:CappedCausalLM"

    layer_types: SlidingTypes = training_setting(
        "full_attention or sliding_attention for every layer, full for the last; default: every sixth, and the last",
        default=attrs.Factory(
            lambda self: [*alternate_layer_types(self.num_hidden_layers, 6)[:-1], FULL], takes_self=True
        ),
    )
    sliding_window: int = 512
    partial_rotary_factor: float = rotary_factor_setting(0.25)
    global_head_dim: int = size_setting("head_dim", "width of a head in layers with full attention", default=512)
    num_global_key_value_heads: int | None = size_setting(
        "num_attention_heads",
        "number of key heads in layers with full attention, with attention_k_eq_v; default: num_key_value_heads",
        default=None,
    )
    attention_k_eq_v: bool = setting("use keys as values in layers with full attention", default=False)
    final_logit_softcapping: float | None = training_setting(
        "bound that a tanh puts on logits; default: none", default=None, check=above(0)
    )

    @property
    def attention_score_scale(self) -> float:
        return 1.0

    def rope_of(self, layer: int) -> Rope | None:
        if self.window_of(layer) is not None:
            return Rope(self.head_dim, self.rope_local_base_freq)
        pairs = int(self.partial_rotary_factor * self.global_head_dim // 2)
        return FirstPairsRope(self.global_head_dim, self.rope_theta, pairs=pairs)

    def grouped_attention_spec_of(self, layer: int) -> NormedValueSpec:
        spec = NormedValueSpec(**attrs.asdict(super().grouped_attention_spec_of(layer), recurse=False))
        if self.window_of(layer) is not None:
            return spec
        shared = self.attention_k_eq_v
        heads = (shared and self.num_global_key_value_heads) or self.num_key_value_heads
        return attrs.evolve(spec, head_dim=self.global_head_dim, kv_heads=heads, keys_as_values=shared)

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        yield from super().find_faults({**given, "partial_rotary_factor": 1.0})
        factor, width = given["partial_rotary_factor"], given["global_head_dim"]
        if int(factor * width // 2) < 1:
            why = f"partial_rotary_factor = {factor} rotates no pair of channels in global_head_dim = {width}"
            yield InvalidSetting("partial_rotary_factor", why, "write a larger factor")
        types, layers = given.get("layer_types"), given["num_hidden_layers"]
        if types and len(types) >= layers and types[layers - 1] != FULL:
            yield InvalidSetting("layer_types", "the last layer has a window, as in no Gemma 4", f"end with {FULL!r}")
        if heads := given.get("num_global_key_value_heads"):
            faults = find_head_count_faults(given["num_attention_heads"], heads, given["global_head_dim"])
            for fault in faults:
                yield attrs.evolve(fault, key="num_global_key_value_heads", why=f"in full attention, {fault.why}")


def _convert_config_from_hf(config: ConfigJson) -> ConfigJson:
    """Convert rope_parameters by layer type, and transformers' sizes by layer. Raises ValueError for other kinds."""
    config = split_rope_by_type(config, "rope_local_base_freq", SLIDING_THETA)
    full = config.pop("rope_parameters", None) or {}
    if (kind := full.get("rope_type", "proportional")) != "proportional" or full.get("factor", 1.0) != 1.0:
        raise ValueError(f"has rotary positions of type {kind!r}, or with a factor, in full attention")
    config = {
        "hidden_size_per_layer_input": 256,  # transformers' default, which is refused
        **config,
        "rope_theta": full.get("rope_theta", 1e6),
        "partial_rotary_factor": full.get("partial_rotary_factor", 0.25),
    }
    if config.get("use_bidirectional_attention") == "vision":  # for images alone
        del config["use_bidirectional_attention"]
    overridden: ConfigJson = next(iter((config.get("per_layer_config") or {}).values()), {})
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return config | {names[key]: value for key, value in overridden.items() if key in names}


def _convert_config_to_hf(config: ConfigJson) -> ConfigJson:
    """Convert rotary positions to rope_parameters by layer type."""
    factor, theta = config["partial_rotary_factor"], config["rope_theta"]
    full = {"rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": theta}
    return join_rope_by_type({**config, "rope_parameters": full}, config["rope_local_base_freq"])


@component(impact="incompatible")
class Gemma4(DecoderBuilder):
    """A Gemma 4 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        Gemma4Config,
        "gemma4_text",
        "Gemma4ForCausalLM",
        hf_defaults={"max_position_embeddings": 131_072, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 256, "vocab_size": 262_144},
        fixed={
            "hidden_act": GELU,
            "hidden_activation": GELU,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_bidirectional_attention": None,
        },
        derives_head_dim=False,
        nested_types={"gemma4": "model.language_model."},
        ignored=("*vision_tower.*", "*embed_vision.*", "*audio_tower.*", "*embed_audio.*"),
        read=_convert_config_from_hf,
        write=_convert_config_to_hf,
        has_classifier=False,
    )
