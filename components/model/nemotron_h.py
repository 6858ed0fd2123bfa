"""The component `model.nemotron_h`: Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624)."""

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from drawloom import at_least, component, setting
from drawloom.components.model.declarations import (
    FULL,
    LINEAR,
    NO_POSITIONS,
    Branch,
    DecoderBuilder,
    ExpertSpec,
    Family,
    MlpSpec,
    PartSpec,
    SigmoidExpertsConfig,
    SquaredRelu,
    StateSpaceSpec,
    concatenate,
    config_class,
    sequential,
    size_setting,
    training_setting,
    unsqueeze,
)
from drawloom.ports import ConfigJson, Mapper

TYPES = {"M": LINEAR, "mamba": LINEAR, "*": FULL, "attention": FULL, "E": "moe", "-": "mlp"}
"""Types of layers by their letters and older names in published configs."""


@config_class
class NemotronHConfig(SigmoidExpertsConfig):
    """Config of Nemotron-H: a layer is one of Mamba-2, attention without positions, experts and a squared-ReLU MLP."""

    unused_keys = (*NO_POSITIONS, "first_k_dense_replace", "n_shared_experts")
    can_tie = False
    multiples = (("mamba_num_heads", "n_groups"),)
    renamed = SigmoidExpertsConfig.renamed | {
        "layer_types": "layers_block_type",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    renamed_tensors = {
        r"^model\.embed_tokens\.": "backbone.embeddings.",
        r"^model\.norm\.": "backbone.norm_f.",
        r"^model\.layers\.": "backbone.layers.",
    }
    renamed_modules = {r"^backbone\.": "model."}

    layer_types: list[Literal["linear_attention", "full_attention", "moe", "mlp"]] = training_setting(
        "linear_attention (Mamba-2), full_attention, moe or mlp for every layer; default: linear_attention, moe, "
        "full_attention and moe in turn",
        default=attrs.Factory(
            lambda self: [(LINEAR, "moe", FULL, "moe")[n % 4] for n in range(self.num_hidden_layers)], takes_self=True
        ),
    )
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    intermediate_size: int = 21_504
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = size_setting(
        "intermediate_size", "inner width of the expert that all tokens visit", default=7688
    )
    moe_latent_size: int | None = size_setting(
        "hidden_size", "width of the experts' inputs and outputs; default: hidden_size", default=None
    )
    mamba_num_heads: int = size_setting("num_attention_heads", "number of heads in Mamba-2", default=128)
    mamba_head_dim: int = size_setting("head_dim", "width of a head in Mamba-2", default=64)
    n_groups: int = size_setting(
        "num_attention_heads", "number of groups of heads with equal B and C in Mamba-2", default=8
    )
    ssm_state_size: int = size_setting("head_dim", "width of B and C in Mamba-2", default=128)
    conv_kernel: int = size_setting("taps", "number of tokens in a convolution", default=4)
    use_conv_bias: bool = setting("add biases to convolutions", default=True)
    time_step_min: float = training_setting("least time step in Mamba-2", default=0.001, check=at_least(0))

    @property
    def shared_expert_width(self) -> int:
        return self.moe_shared_expert_intermediate_size

    @property
    def expert_spec(self) -> ExpertSpec:
        spec = attrs.evolve(super().expert_spec, activation=SquaredRelu(), latent_width=self.moe_latent_size)
        return spec if self.moe_latent_size is None else attrs.evolve(spec, part="experts:LatentMoeBlock")

    @property
    def delta(self) -> StateSpaceSpec:
        """The specification of Mamba-2's layers."""
        return StateSpaceSpec(
            key_heads=self.n_groups,
            value_heads=self.mamba_num_heads,
            key_dim=self.ssm_state_size,
            value_dim=self.mamba_head_dim,
            taps=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            min_time_step=self.time_step_min,
        )

    def layer_has_experts(self, number: int) -> bool:
        return self.layer_types[number] == "moe"

    def branches_of(self, layer: int) -> Sequence[Branch]:
        spec: PartSpec
        match self.layer_types[layer]:
            case "linear_attention":
                spec = self.delta
            case "full_attention":
                spec = self.mixer_spec_of(layer)
            case "moe":
                spec = self.expert_spec
            case "mlp":
                spec = MlpSpec(width=self.intermediate_size, activation="relu2")
        return (Branch("norm", "mixer", spec),)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Read layer types from letters or older names, and count the layers."""
        given = config.get("layer_types") or config.get("hybrid_override_pattern")
        if not given:
            return config
        return {**config, "layer_types": [TYPES.get(kind, kind) for kind in given], "num_hidden_layers": len(given)}

    def join_tensors(self, name: str) -> Iterator[Mapper]:
        """Yield the mappers that join the projections and the convolutions of Mamba-2."""
        mixer, is_mixer, _ = name.partition(".A_log")
        if not is_mixer:
            return
        sizes = self.delta.channels[::-1]
        widths = [sizes[0], *sizes, self.mamba_num_heads]
        convolution = f"{mixer}.conv1d.weight"
        taps = concatenate([f"{mixer}.conv_{part}" for part in "vkq"], convolution, sizes=sizes)
        yield sequential(taps, unsqueeze(convolution, 1))
        if self.use_conv_bias:
            yield concatenate([f"{mixer}.conv_{part}_bias" for part in "vkq"], f"{mixer}.conv1d.bias", sizes=sizes)
        parts = [f"{mixer}.in_proj_{part}.weight" for part in "zvkqa"]
        yield concatenate(parts, f"{mixer}.in_proj.weight", sizes=widths)


@component(impact="incompatible")
class NemotronH(DecoderBuilder):
    """
    A Nemotron-H or Nemotron 3 language model, with sizes from this table or a Hugging Face `config.json`.

    The phase `phases.router_bias` balances the experts by a bias per expert.
    """

    family = Family(
        NemotronHConfig,
        "nemotron_h",
        "NemotronHForCausalLM",
        hf_defaults={"num_key_value_heads": 8, "head_dim": 128},
        fixed={
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "sliding_window": None,
            "residual_in_fp32": False,
            **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
        },
        derives_head_dim=False,
        ignored=("mtp.*",),
        has_classifier=False,
    )
