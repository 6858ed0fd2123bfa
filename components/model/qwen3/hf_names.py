"""
Our parameters and Hugging Face's, in both directions.

Files hold a matrix for each projection of each expert, also those that transformers writes, which has the experts of a
layer in one tensor as we do. Its gates lie before what they open, as ours.
"""

from collections.abc import Iterator

from drawloom.components.model.qwen3.config import Qwen3Config, Qwen3MoeConfig
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.mapper import parallel, prefixed, sequential
from drawloom.components.weights.mapper_ops import chunk, rename, unstack

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
}
DENSE_NAMES = {
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
EXPERT_NAMES = {"feed_forward.router": "mlp.gate"}


def mapper_of(architecture: Qwen3Config) -> Mapper:
    """Our parameters to Hugging Face's."""
    head = {} if architecture.tie_word_embeddings else {"head.weight": "lm_head.weight"}
    return parallel(
        rename({"embedding.weight": "model.embed_tokens.weight"}),
        *_layers(architecture),
        rename({"norm.weight": "model.norm.weight"} | head),
    )


def _layers(architecture: Qwen3Config) -> Iterator[Mapper]:
    dense = _weights(LAYER_NAMES | DENSE_NAMES)
    sparse = dense
    if isinstance(architecture, Qwen3MoeConfig):
        sparse = parallel(_weights(LAYER_NAMES | EXPERT_NAMES), *_experts(architecture.num_experts))
    for n in range(architecture.num_hidden_layers):
        layer = sparse if isinstance(architecture, Qwen3MoeConfig) and architecture.has_experts(n) else dense
        yield prefixed(layer, source=f"layers.{n}.", target=f"model.layers.{n}.")


def _weights(names: dict[str, str]) -> Mapper:
    return rename({f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})


def _experts(count: int) -> Iterator[Mapper]:
    """The tensors of all experts of a layer, each cut into those of one."""
    experts = [f"mlp.experts.{expert}" for expert in range(count)]
    pairs = [chunk(expert, [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"]) for expert in experts]
    yield sequential(unstack("feed_forward.gate_up.weight", experts), parallel(*pairs))
    yield unstack("feed_forward.down.weight", [f"{expert}.down_proj.weight" for expert in experts])
