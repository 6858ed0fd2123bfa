"""The component `model.nemotron_h`: Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624)."""

from collections.abc import Sequence
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
    Join,
    PartSpec,
    SigmoidExpertsConfig,
    SquaredRelu,
    StateSpaceSpec,
    size_setting,
    training_setting,
)
from drawloom.ports import ConfigJson

TYPES = {"M": LINEAR, "mamba": LINEAR, "*": FULL, "attention": FULL, "E": "moe", "-": "mlp"}
"""Types of layers by their letters and older names in published configs."""


class NemotronHConfig(SigmoidExpertsConfig):
    """Config of Nemotron-H: a layer is one of Mamba-2, attention without positions, experts and a squared-ReLU MLP."""

    unused_keys = (*NO_POSITIONS, "first_k_dense_replace", "n_shared_experts")
    can_tie = False
    activation = SquaredRelu()
    multiples = (("mamba_num_heads", "n_groups"),)
    renamed = SigmoidExpertsConfig.renamed | {
        "layer_types": "layers_block_type",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    joins = (
        Join("conv1d.weight", "conv_{}", "vkq"),
        Join("conv1d.bias", "conv_{}_bias", "vkq"),
        Join("in_proj.weight", "in_proj_{}.weight", "zvkqa"),
    )
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
        spec = super().expert_spec
        return spec if spec.moe_latent_size is None else attrs.evolve(spec, part="experts:LatentMoeBlock")

    @property
    def delta(self) -> StateSpaceSpec:
        """The specification of Mamba-2's layers."""
        return StateSpaceSpec(
            linear_num_key_heads=self.n_groups,
            linear_num_value_heads=self.mamba_num_heads,
            linear_key_head_dim=self.ssm_state_size,
            linear_value_head_dim=self.mamba_head_dim,
            taps=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            min_time_step=self.time_step_min,
        )

    def layer_has_experts(self, number: int) -> bool:
        return self.layer_types[number] == "moe"

    def branches_of(self, layer: int) -> Sequence[Branch]:
        mixers: dict[str, PartSpec] = {LINEAR: self.delta, FULL: self.mixer_spec_of(layer)}
        return (Branch("norm", "mixer", mixers.get(self.layer_types[layer]) or self.mlp_spec_of(layer)),)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Read layer types from letters or older names, and count the layers."""
        given = config.get("layer_types") or config.get("hybrid_override_pattern")
        if not given:
            return config
        return {**config, "layer_types": [TYPES.get(kind, kind) for kind in given], "num_hidden_layers": len(given)}


@component(impact="incompatible")
class NemotronH(DecoderBuilder):
    """
    A Nemotron-H or Nemotron 3 language model, with sizes from this table or a Hugging Face `config.json`.

    The phase `phases.router_bias` balances the experts by a bias per expert.
    """

    config_type = NemotronHConfig
    model_type = "nemotron_h"
    class_name = "NemotronHForCausalLM"
    hf_defaults = {"num_key_value_heads": 8, "head_dim": 128}
    fixed = {
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "sliding_window": None,
        "residual_in_fp32": False,
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
    }
    ignored = ("mtp.*",)
    has_classifier = False
