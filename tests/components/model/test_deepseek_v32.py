"""DeepSeek-V3.2 and GLM-5 against transformers, and their indexer's loss."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from drawloom import Recipe
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.deepseek_v32 import DeepseekV32
from drawloom.components.model.glm_moe_dsa import GlmMoeDsa
from drawloom.components.weights.load import persistent_tensors
from drawloom.kernels.recompute.policy import apply_recompute_policy, make_recomputable
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    gradients,
    small,
)
from support.family_words import FAMILY_WORDS
from support.qwen3 import cpu_kernels, losses_of, one_document, twin, whole

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "kv_lora_rank": 9,
    "q_lora_rank": 11,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "index_topk": 5,
    "index_n_heads": 12,  # with few heads several scores of a token may be 0, and then its choice is arbitrary
    "index_head_dim": 8,
    "indexer_loss_coef": 0.0,
}


def deepseek(**changes: Any) -> DecoderBuilder:
    return small(DeepseekV32, **SIZES | changes)


def glm(**changes: Any) -> DecoderBuilder:
    types = {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "shared"]}
    return small(GlmMoeDsa, **SIZES | types | changes)


@pytest.mark.parametrize("build", [deepseek, glm])
def test_numbers_equal_those_of_transformers(build: Callable[..., DecoderBuilder], tmp_path: Path) -> None:
    """Logits, losses of packed documents and gradients equal transformers', and files go both ways."""
    assert_equal_to_transformers(build(), without_gradient="*.indexer.*")
    assert_files_go_both_ways(build(), tmp_path)


def test_a_key_that_transformers_lacks_changes_no_number(tmp_path: Path) -> None:
    """Adjacent channels are rotated whatever a file says of `rope_interleave`, as by transformers."""
    config = deepseek().hugging_face_config() | {"rope_interleave": False}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    settings: dict[str, Any] = {"config": tmp_path, "indexer_loss_coef": 0.0}
    assert_equal_to_transformers(DeepseekV32(kernels=cpu_kernels(), **settings), without_gradient="*.indexer.*")


@pytest.mark.parametrize("build", [deepseek, glm])
def test_parts_of_a_text_have_its_logits(build: Callable[..., DecoderBuilder]) -> None:
    """Generation token by token, with cached index keys, equals the whole text."""
    assert_generated_as_whole_texts(build())


def test_recomputed_layers_share_the_choice_of_their_indexer() -> None:
    """Layers without an indexer recompute attention to the same tokens, bit by bit, also the indexers' gradients."""
    torch.manual_seed(0)
    module: Any = whole(glm(indexer_loss_coef=1.0, num_hidden_layers=6, indexer_types=["full", "shared"] * 3))
    tokens, targets = torch.randint(29, (2, 2, 11))
    make_recomputable([*module.model.layers.values()])
    grads = []
    for policy in ("none", "blocks"):
        with apply_recompute_policy(policy):
            losses = losses_of(module, tokens, one_document(2, 11), targets)
        grads.append(gradients(losses.sum(), dict(module.named_parameters())))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("keys", "types"),
    [
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, "FFSSFSS"),
        ({"index_topk_pattern": "FSFSSSF"}, "FSFSSSF"),
        ({}, "FFFFFFF"),
    ],
)
def test_published_configs_name_shared_indexers(keys: dict[str, Any], types: str, tmp_path: Path) -> None:
    """Letters, or a period and an offset, are read as layer types like by transformers."""
    config = {key: value for key, value in glm().hugging_face_config().items() if key != "indexer_types"}
    config |= {"num_hidden_layers": 7, "mlp_layer_types": None, **keys}
    assert "".join(kind[0].upper() for kind in transformers.AutoConfig.for_model(**config).indexer_types) == types
    (tmp_path / "config.json").write_text(json.dumps(config))
    read: Any = read_config(GlmMoeDsa, tmp_path)
    assert "".join(kind[0].upper() for kind in read.indexer_types) == types


def compute_indexer_loss(reference: Any, tokens: Tensor) -> Tensor:
    """Return the sum over tokens of the cross entropy of the indexer's scores to transformers' attention."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

    layer, rows = reference.model.layers[0], tokens.shape
    attention = reference(tokens, output_attentions=True).attentions[0].mean(1).detach()
    hidden = layer.input_layernorm(reference.model.embed_tokens(tokens)).detach()
    latent = layer.self_attn.q_a_layernorm(layer.self_attn.q_a_proj(hidden)).detach()
    indexer = layer.self_attn.indexer
    q, k = indexer.wq_b(latent).view(*rows, 12, 8), indexer.k_norm(indexer.wk(hidden)).view(*rows, 1, 8)
    angles = reference.model.rotary_emb(hidden, torch.arange(rows[1])[None])
    rotated = apply_rotary_pos_emb(q[..., :6], k[..., :6], *angles, unsqueeze_dim=2)
    q, k = (torch.cat([first, x[..., 6:]], -1) for first, x in zip(rotated, (q, k), strict=True))
    products = (q.movedim(2, 1) @ k.movedim(2, 1).mT * 8**-0.5).relu()
    scores = (products * indexer.weights_proj(hidden).movedim(-1, 1)[..., None] * 12**-0.5).sum(1)
    learned = scores.masked_fill(attention == 0, -torch.inf).log_softmax(-1)
    return -torch.where(attention == 0, 0.0, attention * learned).sum()


@pytest.mark.parametrize("warmup", [False, True])
def test_the_indexer_learns_from_attention(warmup: bool) -> None:
    """The indexer's gradients are its cross entropy's, over the tokens seen, and reach no other parameter."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "indexer_warmup": warmup, "first_k_dense_replace": 0}
    model, silent = (deepseek(**sizes, indexer_loss_coef=coef) for coef in (1.0, 0.0))
    module, other = whole(model), whole(silent)
    other.load_state_dict(module.state_dict())
    reference = twin(model, persistent_tensors(module), index_topk=99 if warmup else 5)
    tokens, targets = torch.randint(model.vocab_size, (2, 2, 11))
    for part in (module, other):
        loss: Any = losses_of(part, tokens, one_document(2, 11), targets).sum()
        loss.backward()
    learned = reference.model.layers[0].self_attn.indexer
    wanted_loss: Any = compute_indexer_loss(reference, tokens)
    wanted_loss.backward()
    own, plain = (dict(part.named_parameters()) for part in (module, other))
    for name, parameter in own.items():
        if ".indexer." in name:
            wanted = learned.get_parameter(name.partition(".indexer.")[2]).grad
            torch.testing.assert_close(parameter.grad, wanted, atol=1e-5, rtol=1e-4)
            assert plain[name].grad is None and bool(wanted.any())
        else:
            torch.testing.assert_close(parameter.grad, plain[name].grad, atol=0, rtol=0)


def test_attention_counts_pairs_with_chosen_tokens() -> None:
    """FLOPs of attention are for `index_topk` keys, with or without an own indexer; an indexer scores all keys."""
    flops = glm().forward_flops().per_pair
    assert flops == {5: 4 * 2 * 4 * (10 + 6 + 7), None: 2 * 2 * 12 * 8}
    assert glm(indexer_warmup=True).forward_flops().per_pair == {None: sum(flops.values())}


SHARED = 'model.indexer_types=["full","shared","shared","full"]'
COMMON = ("model.num_hidden_layers=4", "model.hidden_size=64", "model.num_attention_heads=2")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("model.q_lora_rank=0",), "q_lora_rank"),
        (("mesh.context=2",), "the indexer chooses among all tokens of a row"),
        (("model.index_head_dim=2",), "head_dim = 32 is more than index_head_dim = 2"),
        (("mesh.pipeline=2", SHARED), "layers share indexers"),
        (('model.indexer_types=["shared","full","full","full"]',), "the first layer shares no earlier indexer"),
        (('model.indexer_types=["full"]',), "indexer_types has 1 types"),
    ],
)
def test_check_refuses_what_the_indexer_can_not_do(words: tuple[str, ...], text: str) -> None:
    """A mesh along context, and sizes that do not fit, are problems of the recipe, with place and remedy."""
    graph = Recipe.load("first_run", *FAMILY_WORDS["glm_moe_dsa"], *COMMON, *words).graph
    assert any(text in problem.text for problem in graph.errors), graph.errors
