"""The component `model.gemma4`: Gemma 4 for text (Gemma team 2026)."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor

from drawloom import above, component, setting
from drawloom.components.model.declarations import (
    FULL,
    Branch,
    DecoderBuilder,
    InvalidSetting,
    MlpSpec,
    MoeConfig,
    PartSpec,
    PerLayerInputSpec,
    Rope,
    SlidingTypes,
    alternate_by_layer,
    find_head_count_faults,
    rotary_factor_setting,
    size_setting,
    training_setting,
)
from drawloom.components.model.gemma3 import GELU, GemmaConfig
from drawloom.ports import ConfigJson, Settings


@attrs.frozen
class FirstPairsRope(Rope):
    """Rotary positions of the first pairs in a head alone, at their frequencies if all were rotated."""

    pairs: int = attrs.field(kw_only=True)

    def compute_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().compute_cos_sin(positions)
        cos[..., self.pairs :], sin[..., self.pairs :] = 1.0, 0.0
        return cos, sin


EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144}
"""Defaults for text models in gemma4_unified."""


class Gemma4Config(GemmaConfig, MoeConfig):
    """
    Config of Gemma 4: layers with full attention have other heads, whose keys may be the values, too.

    Last layers may use the keys and values of earlier ones, all layers may have an embedding of their own, and experts
    beside the feed-forward network.
    """

    unused_keys = ("rope_scaling",)
    renamed = {"num_experts_per_tok": "top_k_experts"}
    zero_is_null = EXPERTS
    stacks_experts = True
    attention_score_scale = 1.0
    router_name = "router"
    shared_name = "mlp"
    renamed_tensors = {
        r"\.feed_forward\.router\.weight$": ".router.proj.weight",
        r"\.(feed_forward|per_layer)\.": ".",
    }
    layer_class = "gemma4:ScaledBlock"
    decoder_class = "gemma4:PerLayerDecoder"
    model_class = "gemma4:CappedCausalLM"

    layer_types: SlidingTypes = training_setting(
        "full_attention or sliding_attention for every layer, full for the last; default: every sixth, and the last",
        default=attrs.Factory(
            lambda self: [*alternate_by_layer(self.num_hidden_layers, 6)[:-1], FULL], takes_self=True
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
    num_kv_shared_layers: int = size_setting(
        "num_hidden_layers",
        "number of last layers with the keys and values of the last layer of their type before them",
        least=0,
        default=0,
    )
    use_double_wide_mlp: bool = setting("double intermediate_size in layers with others' keys", default=False)
    hidden_size_per_layer_input: int = size_setting(
        "hidden_size", "width of the embedding that each layer has for itself; 0: none", least=0, default=0
    )
    num_experts: int = size_setting("num_experts", "number of routed experts per layer; 0: none", least=0, default=0)
    num_experts_per_tok: int = size_setting("num_experts", "number of routed experts per token", least=0, default=0)
    moe_intermediate_size: int = size_setting("intermediate_size", "inner width of an expert", least=0, default=0)
    attention_k_eq_v: bool = setting("use keys as values in layers with full attention", default=False)
    final_logit_softcapping: float | None = training_setting(
        "bound that a tanh puts on logits; default: none", default=None, check=above(0)
    )

    @property
    def unread_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        users = [layer for layer in range(self.num_hidden_layers) if self.key_layer_of(layer) != layer]
        parts = "k_proj", "v_proj", "k_norm"
        return tuple(f"model.layers.{layer}.self_attn.{part}.*" for layer in users for part in parts)

    def rope_of(self, layer: int) -> Rope | None:
        if self.window_of(layer) is not None:
            return Rope(self.head_dim, self.rope_local_base_freq)
        pairs = int(self.partial_rotary_factor * self.global_head_dim // 2)
        return FirstPairsRope(self.global_head_dim, self.rope_theta, pairs=pairs)

    def key_layer_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer uses: perhaps itself."""
        first, kind = self.num_hidden_layers - self.num_kv_shared_layers, self.layer_types[layer]
        return layer if layer < first else max(n for n in range(first) if self.layer_types[n] == kind)

    def mixer_spec_of(self, layer: int) -> Any:
        source, users = self.key_layer_of(layer), map(self.key_layer_of, range(layer + 1, self.num_hidden_layers))
        plain: Any = super().mixer_spec_of(layer)
        spec = attrs.evolve(
            plain,
            part=f"gemma4:{'NormedValueAttention' if source == layer else 'SharedKeysAttention'}",
            is_linked=source != layer,
            link=f"keys {source}" if source != layer or layer in users else "",
        )
        if self.window_of(layer) is not None:
            return spec
        shared = self.attention_k_eq_v
        heads = (shared and self.num_global_key_value_heads) or self.num_key_value_heads
        return attrs.evolve(spec, head_dim=self.global_head_dim, num_key_value_heads=heads, keys_as_values=shared)

    def layer_has_experts(self, number: int) -> bool:
        return self.num_experts > 0

    def mlp_spec_of(self, layer: int) -> PartSpec:
        is_wide = self.use_double_wide_mlp and self.key_layer_of(layer) != layer
        width = self.intermediate_size * (2 if is_wide else 1)
        if not self.num_experts:
            return MlpSpec.from_config(self, width=width)
        return attrs.evolve(
            self.expert_spec,
            part="gemma4:NormedMoeBlock",
            shared_expert_width=width,
        )

    def branches_of(self, layer: int) -> Sequence[Branch]:
        attention, mlp = super().branches_of(layer)
        if self.num_experts:
            mlp = attrs.evolve(mlp, norm_before=None, name="feed_forward")
        if not (width := self.hidden_size_per_layer_input):
            return attention, mlp
        gate = PerLayerInputSpec(width=width, number=layer)
        return attention, mlp, Branch(None, "per_layer", gate, "post_per_layer_input_norm")

    @classmethod
    def find_split_faults(cls, sizes: Settings, dimension: str, ranks: int) -> Iterator[str]:
        yield from super().find_split_faults(sizes, dimension, ranks)
        for key in ("num_kv_shared_layers", "hidden_size_per_layer_input") if dimension == "pipeline" else ():
            if sizes.get(key):
                yield f"with {key} = {sizes[key]} layers read tensors of others"

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        yield from super().find_faults({**given, "partial_rotary_factor": 1.0})
        if given["num_experts"] and (missing := [key for key in EXPERTS if not given[key]]):
            yield InvalidSetting(missing[0], f"{missing[0]} is missing, and there are experts", "write it")
        layers, types = given["num_hidden_layers"], given.get("layer_types")
        kinds = [*(types or alternate_by_layer(layers, 6))[: layers - 1], FULL]
        if without := {*kinds} - {*kinds[: max(0, layers - given["num_kv_shared_layers"])]}:
            why = f"no layer before the last {given['num_kv_shared_layers']} has keys for {min(without)}"
            yield InvalidSetting("num_kv_shared_layers", why, "write fewer")
        factor, width = given["partial_rotary_factor"], given["global_head_dim"]
        if int(factor * width // 2) < 1:
            why = f"partial_rotary_factor = {factor} rotates no pair of channels in global_head_dim = {width}"
            yield InvalidSetting("partial_rotary_factor", why, "write a larger factor")
        if types and len(types) >= layers and types[layers - 1] != FULL:
            yield InvalidSetting("layer_types", "the last layer has a window, as in no Gemma 4", f"end with {FULL!r}")
        if heads := given.get("num_global_key_value_heads"):
            faults = find_head_count_faults(given["num_attention_heads"], heads, given["global_head_dim"])
            for fault in faults:
                yield attrs.evolve(fault, key="num_global_key_value_heads", why=f"in full attention, {fault.why}")

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert transformers' sizes by layer, too. Raises ValueError for other kinds."""
        config = super().read_keys(config)
        full = config.get("rope_parameters") or {}
        if (kind := full.get("rope_type", "proportional")) != "proportional" or full.get("factor", 1.0) != 1.0:
            raise ValueError(f"has rotary positions with rope_type = {kind!r}, or with a factor, in full attention")
        is_unified = config.get("model_type") == "gemma4_unified_text"
        config = {
            **(UNIFIED if is_unified else {"hidden_size_per_layer_input": 256}),
            **config,
            "rope_parameters": None,
            "rope_theta": full.get("rope_theta", 1e6),
            "partial_rotary_factor": full.get("partial_rotary_factor", 0.25),
        }
        if config.get("use_bidirectional_attention") == "vision":  # for images alone
            del config["use_bidirectional_attention"]
        if not config.get("enable_moe_block"):
            config = {key: value for key, value in config.items() if key not in EXPERTS}
        rows = config.get("vocab_size_per_layer_input", config.get("vocab_size"))
        if config["hidden_size_per_layer_input"] and rows != config.get("vocab_size"):
            raise ValueError(f"says vocab_size_per_layer_input = {rows}, where only vocab_size can be built")
        overridden: ConfigJson = next(iter((config.get("per_layer_config") or {}).values()), {})
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        return config | {names[key]: value for key, value in overridden.items() if key in names}

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        factor, theta = config["partial_rotary_factor"], config["rope_theta"]
        full = {"rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": theta}
        derived = {"enable_moe_block": bool(config["num_experts"]), "vocab_size_per_layer_input": config["vocab_size"]}
        return super().write_keys({**config, **derived, "rope_parameters": full})


@component(impact="incompatible")
class Gemma4(DecoderBuilder):
    """A Gemma 4 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Gemma4Config
    model_type = "gemma4_text"
    class_name = "Gemma4ForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_144,
    }
    fixed = {"hidden_act": GELU, "hidden_activation": GELU, "use_bidirectional_attention": None}
    other_types = ("gemma4_unified_text",)
    nested_types = dict.fromkeys(("gemma4", "gemma4_unified"), "model.language_model.")
    ignored = ("*vision_tower.*", "*vision_embedder.*", "*embed_vision.*", "*audio_tower.*", "*embed_audio.*")
    has_classifier = False
