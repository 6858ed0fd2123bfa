"""The component `model.pattern`: a model of one's own, whose layers are a pattern of parts."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from drawloom import component, setting
from drawloom.components.model.declarations import (
    Branch,
    ChannelDeltaSpec,
    ConnectedBranch,
    ConnectionSpec,
    DecoderBuilder,
    DeltaConfig,
    InvalidSetting,
    PartSpec,
    ShortConvSpec,
    StateSpaceSpec,
    size_setting,
    training_setting,
    window_setting,
)
from drawloom.ports import ConfigJson, Settings

MODULES = {
    **dict.fromkeys(("attention", "window"), "self_attn"),
    **dict.fromkeys(("gdn", "kda", "mamba"), "linear_attn"),
    "conv": "conv",
}
"""Module names by part."""

MAX_PATTERN = 10_000
"""Most layers in a pattern, as in a model."""


def parse_pattern(text: str) -> list[str]:
    """Return the part of every layer in a pattern such as '3 x gdn, 1 x attention'. Raises ValueError."""
    parts: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,5})\s*x\s*)?([a-z]+)\s*", item)
        if match is None or match[2] not in MODULES or not 0 < (count := int(match[1] or 1)) <= MAX_PATTERN:
            raise ValueError(f"{item.strip()!r} is not a part, or a number of equal ones")
        parts += [match[2]] * count
    return parts


class PatternConfig(DeltaConfig):
    """Config of a pre-norm decoder whose layers have the parts in `layers`, again and again, and a gated MLP."""

    unused_keys = ("layer_types",)
    qk_norm = "head"

    layers: str = training_setting(
        "parts of the layers, which repeat, as in '3 x gdn, 1 x attention': attention, window (attention in "
        "sliding_window tokens), gdn (gated delta net), kda (with decays by channel), mamba (Mamba-2, whose groups, "
        "heads and state are linear_num_key_heads, linear_num_value_heads and linear_key_head_dim), conv (gated short "
        "convolution)"
    )
    sliding_window: int = window_setting(4096)
    use_qk_norm: bool = setting("apply RMSNorm to queries and keys by head", default=True)
    residual: Literal["plain", "hyper", "constrained"] = setting(
        "residual connections: to one stream, or to residual_streams by learned weights (hyper-connections), also "
        "constrained ones (mHC)",
        default="plain",
    )
    residual_streams: int = size_setting("taps", "number of streams for hyper-connections", least=2, default=4)
    attention_gate: bool = setting("multiply attention's output by a sigmoid gate", default=False)
    conv_L_cache: int = size_setting("taps", "number of tokens in a conv", default=3)

    def part_of(self, layer: int) -> str:
        """Return a layer's part."""
        parts = parse_pattern(self.layers)
        return parts[layer % len(parts)]

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.part_of(layer) == "window" else None

    def part_spec_of(self, layer: int) -> PartSpec:
        """Return a layer's specification."""
        sizes = attrs.asdict(attrs.evolve(self.delta, draws_time_steps=True))
        match self.part_of(layer):
            case "gdn":
                return self.delta
            case "kda":
                return ChannelDeltaSpec(**sizes, rank=self.linear_value_head_dim)
            case "mamba":
                return StateSpaceSpec(**sizes, conv_bias=True)
            case "conv":
                return ShortConvSpec(taps=self.conv_L_cache)
        return self.mixer_spec_of(layer)

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        return MODULES[self.part_of(layer)], self.part_spec_of(layer)

    def branches_of(self, layer: int) -> Sequence[Branch]:
        branches, streams = super().branches_of(layer), self.residual_streams
        if self.residual == "plain":
            return branches
        first, is_constrained = layer * len(branches), self.residual == "constrained"
        return [
            ConnectedBranch(
                **attrs.asdict(branch, recurse=False),
                connection=ConnectionSpec(
                    streams=streams, first=(first + index) % streams, is_constrained=is_constrained
                ),
            )
            for index, branch in enumerate(branches)
        ]

    @property
    def layer_class(self) -> str:  # type: ignore[override]
        return "layer:Block" if self.residual == "plain" else "hyper_connections:HyperBlock"

    @property
    def decoder_class(self) -> str:  # type: ignore[override]
        return "model:Decoder" if self.residual == "plain" else "hyper_connections:HyperDecoder"

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        # Qwen3's and Llama's files name no parts, since they have attention in every layer.
        return {"layers": "attention", "use_qk_norm": config.get("model_type") != "llama", **config}

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """Yield inherited faults, and a pattern's: unknown parts, or an end within its last repetition."""
        yield from super().find_faults(given)
        try:
            count = len(parse_pattern(given["layers"]))
        except ValueError as error:
            remedy = f"write parts such as '3 x gdn, 1 x attention', of {', '.join(MODULES)}"
            yield InvalidSetting("layers", str(error), remedy)
            return
        if (layers := given["num_hidden_layers"]) % count:
            why = f"the pattern in layers has {count} layers, which do not divide num_hidden_layers = {layers}"
            yield InvalidSetting("num_hidden_layers", why, f"write {-(-layers // count) * count}, or another pattern")


@component(impact="incompatible")
class Pattern(DecoderBuilder):
    """
    A language model whose layers are a pattern of parts, for architectures of one's own.

    transformers has no class for it, so it can't be exported; runs keep it in checkpoints. `config` may be of Qwen3 or
    Llama, whose layers the pattern replaces.
    """

    config_type = PatternConfig
    model_type = "drawloom_pattern"
    class_name = "PatternForCausalLM"
    other_types = ("qwen3", "llama")
    fixed = {"use_sliding_window": False, "mlp_bias": False}
    has_classifier = False

    @classmethod
    def explain_missing_export(cls, node: Any) -> str:
        return f"transformers has no class for the layers of {node.use}"
