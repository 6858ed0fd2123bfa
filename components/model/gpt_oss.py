"""The component `model.gpt_oss`: gpt-oss 20B and 120B (OpenAI 2025, arXiv 2508.10925)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import (
    DecoderConfig,
    LayerTypesConfig,
    create_size_check,
    find_expert_count_faults,
)
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.rope import InvalidSetting
from drawloom.components.model.decoder.router import Routing
from drawloom.components.model.decoder.specs import ClampedSwiGlu, ExpertSpec, MixerSpec, MlpSpec
from drawloom.components.model.decoder.values import COEFFICIENT, declare_config_key
from drawloom.components.ports.experts import ExpertKernels
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import identity, transpose
from drawloom.graph import above, at_least, component, setting


@attrs.frozen(kw_only=True)
class GptOssConfig(LayerTypesConfig):
    """Config of gpt-oss: attention sinks, windows in every other layer, and experts with biases and bounds."""

    full_attention_interval = 2

    num_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = declare_config_key(COEFFICIENT, 0.001)
    router_z_loss_coef: float = declare_config_key(COEFFICIENT, 0.0)
    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5
    sliding_window: int = 128
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias

    def mixer_spec_of(self, layer: int) -> MixerSpec:
        return attrs.evolve(self.grouped_attention_spec_of(layer), sinks=True)

    def mlp_spec_of(self, layer: int) -> MlpSpec | ExpertSpec:
        return ExpertSpec(
            experts=self.num_experts,
            choices=self.num_experts_per_tok,
            width=self.intermediate_size,
            routing=Routing(norm_topk_prob=True, linear_bias=True),  # a softmax over the chosen experts
            router="router",
            biases=True,
            clamp=ClampedSwiGlu(self.swiglu_alpha, self.swiglu_limit),
            aux_loss_coef=self.router_aux_loss_coef / self.num_hidden_layers,
            z_loss_coef=self.router_z_loss_coef / self.num_hidden_layers,
        )

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        yield from super().find_faults(given)
        yield from find_expert_count_faults(given)


def _create_interleave_mapper(name: str, dim: int) -> Mapper:
    """Interleave a tensor's halves along `dim`: gate and up alternate in files."""

    def interleave(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(tensors[0].chunk(2, dim), dim + 1).flatten(dim, dim + 1)]

    def deinterleave(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        ahead = (slice(None),) * dim
        return [torch.cat([tensors[0][(*ahead, slice(start, None, 2))] for start in (0, 1)], dim)]

    return Mapper((TensorGroup((name,), (name,), interleave, deinterleave),))


def _create_family_mapper(names: Iterable[str], architecture: DecoderConfig) -> Mapper:
    """Return the mapper from parameters to tensors in files."""
    return parallel(*map(_create_parameter_to_files_mapper, names))


def _create_parameter_to_files_mapper(name: str) -> Mapper:
    """Return the mapper for one parameter; expert matrices are transposed and interleaved."""
    if name.endswith(".experts.gate_up_proj"):
        return sequential(_create_interleave_mapper(name, 1), transpose(name, 1, 2))
    if name.endswith(".experts.gate_up_proj_bias"):
        return _create_interleave_mapper(name, 1)
    return transpose(name, 1, 2) if name.endswith(".experts.down_proj") else identity(name)


def _convert_config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Add transformers' default rotary scaling to a config without one."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return config
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return {"rope_theta": 150_000.0, **config, "rope_parameters": yarn}


def _convert_config_to_hf(config: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}, **config}


GPT_OSS = Family(
    "model.gpt_oss",
    "a gpt-oss model",
    GptOssConfig,
    "gpt_oss",
    "GptOssForCausalLM",
    needed=(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    ),
    hf_defaults={"max_position_embeddings": 131_072, "head_dim": 64, "num_key_value_heads": 8},
    renamed={"num_experts": "num_local_experts"},
    derives_head_dim=False,
    read=_convert_config_from_hf,
    write=_convert_config_to_hf,
    mapper=_create_family_mapper,
)


@component(impact="incompatible")
class GptOss(DecoderBuilder):
    """
    A gpt-oss language model, with sizes from this table or a Hugging Face `config.json`.

    Experts in MXFP4 are read as bfloat16, and exported so.
    """

    family = GPT_OSS

    kernels: ExpertKernels
    intermediate_size: int | None = setting(
        default=None, check=create_size_check("intermediate_size"), doc="inner width of an expert"
    )
    num_experts: int | None = setting(
        default=None, check=create_size_check("num_experts"), doc="number of experts per layer"
    )
    num_experts_per_tok: int | None = setting(
        default=None, check=create_size_check("num_experts_per_tok"), doc="number of experts per token"
    )
    sliding_window: int | None = setting(
        default=None,
        check=at_least(1),
        impact="changes_training",
        doc="number of tokens that a token attends to in layers with a window, including itself; default: 128",
    )
    layer_types: list[str] | None = setting(
        default=None,
        impact="changes_training",
        doc="full_attention or sliding_attention for every layer; default: every second is full_attention",
    )
    attention_bias: bool | None = setting(
        default=None, doc="add biases to the linear layers of attention; default: true"
    )
    swiglu_alpha: float | None = setting(
        default=None, check=above(0), impact="changes_training", doc="slope of the experts' gate; default: 1.702"
    )
    swiglu_limit: float | None = setting(
        default=None, check=above(0), impact="changes_training", doc="bound of the experts' inner values; default: 7"
    )
    router_aux_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="load-balancing loss coefficient; default: the config's, or 0.001",
    )
    router_z_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="router z-loss coefficient, to keep the router's logits small; default: the config's, or 0",
    )
