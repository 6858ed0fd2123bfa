"""The component `model.qwen3.moe`."""

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import Qwen3MoeConfig, create_size_check
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.qwen3.dense import FIXED
from drawloom.components.ports.experts import ExpertKernels
from drawloom.graph import at_least, component, setting

MOE = Family(
    "model.qwen3.moe",
    "a Qwen3 model with experts",
    Qwen3MoeConfig,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    needed=(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
    hf_defaults={"norm_topk_prob": False},
    fixed=FIXED,
    derives_head_dim=False,
)


@component(impact="incompatible")
class Qwen3Moe(DecoderBuilder):
    """
    A Qwen3 language model with experts, of sizes given here or by a Hugging Face `config.json`.

    A router sends each token to a few experts of a layer. A load-balancing loss over the tokens of each row and a
    z-loss add their gradients in training, and are no part of the reported losses.
    """

    family = MOE

    kernels: ExpertKernels
    intermediate_size: int | None = setting(
        default=None,
        check=create_size_check("intermediate_size"),
        doc="channels inside the feed-forward network of layers without experts",
    )
    num_experts: int | None = setting(default=None, check=create_size_check("num_experts"), doc="experts of a layer")
    num_experts_per_tok: int | None = setting(
        default=None, check=create_size_check("num_experts_per_tok"), doc="number of experts per token"
    )
    moe_intermediate_size: int | None = setting(
        default=None, check=create_size_check("moe_intermediate_size"), doc="channels inside an expert"
    )
    norm_topk_prob: bool | None = setting(
        default=None,
        impact="changes_training",
        doc="whether the probabilities of a token's experts are normalised to a sum of 1; true if left out",
    )
    decoder_sparse_step: int | None = setting(
        default=None, check=at_least(1), doc="the last of every so many layers has experts; 1 if left out"
    )
    mlp_only_layers: list[int] | None = setting(
        default=None, doc="numbers, from 0, of layers without experts; none if left out"
    )
    router_aux_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="coefficient of the load-balancing loss; the config's, or 0.001, if left out",
    )
    router_z_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="coefficient of the router's z-loss, which keeps its logits small; the config's, or 0, if left out",
    )
