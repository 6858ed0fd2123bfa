"""Gemma 4 for text against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom import Recipe
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.gemma4 import Gemma4
from drawloom.graph import UserError
from drawloom.kernels.recompute.policy import apply_recompute_policy, make_recomputable
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    gradients,
    small,
)
from support.family_words import FAMILY_WORDS
from support.qwen3 import logits_of, one_document, whole

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "router_aux_loss_coef": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {"layer_types": [SLIDING, FULL], "sliding_window": 5, "global_head_dim": 12},
    "gemma4, every flag": {
        "num_hidden_layers": 3,
        "layer_types": [FULL, SLIDING, FULL],
        "sliding_window": 3,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_local_base_freq": 100.0,
        "rope_theta": 1000.0,
        "final_logit_softcapping": 0.5,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-3,
    },
    "gemma4, experts": {
        **{"layer_types": [SLIDING, FULL], "sliding_window": 5, "global_head_dim": 12, "rms_norm_eps": 1e-3, **EXPERTS}
    },
    "gemma4, linked layers": {
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 5,
        "global_head_dim": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "rms_norm_eps": 1e-3,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
}


def gemma(kind: str) -> DecoderBuilder:
    return small(Gemma4, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses of packed documents and all gradients equal transformers' for each document alone."""
    assert_equal_to_transformers(gemma(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, of which transformers' have sizes by layer."""
    assert_files_go_both_ways(gemma(kind), tmp_path)


@pytest.mark.parametrize("kind", ["gemma4, every flag", "gemma4, linked layers"])
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token, with cached keys of two widths or of other layers, equals the whole text."""
    assert_generated_as_whole_texts(gemma(kind))


def test_operations_equal_a_count_by_hand() -> None:
    """Layers with full attention have other heads, and values without a projection of their own."""
    flops = gemma("gemma4, every flag").forward_flops()
    full, sliding = 24 * 4 * 12 * 2 + 24 * 12, 24 * 4 * 8 * 2 + 24 * 2 * 8 * 2
    assert sum(flops.by_parameter.values()) == 2 * (2 * full + sliding + 3 * 3 * 24 * 40 + 24 * 29)
    assert flops.per_pair == {None: 2 * 4 * 4 * 12, 3: 4 * 4 * 8}


def test_recomputed_linked_layers_have_the_same_gradients() -> None:
    """Layers with others' keys and embeddings recompute the same tensors, bit by bit."""
    torch.manual_seed(0)
    module: Any = whole(gemma("gemma4, linked layers"))
    tokens = torch.randint(29, (2, 11))
    plain = gradients(logits_of(module, tokens, one_document(2, 11)).sum(), dict(module.named_parameters()))
    make_recomputable([*module.model.layers.values()])
    with apply_recompute_policy("blocks"):
        logits = logits_of(module, tokens, one_document(2, 11))
    assert all(map(torch.equal, gradients(logits.sum(), dict(module.named_parameters())), plain))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("mesh.pipeline=2", "model.num_kv_shared_layers=1"), "layers read tensors of others"),
        (("mesh.pipeline=2", "model.hidden_size_per_layer_input=8"), "layers read tensors of others"),
        (("model.num_kv_shared_layers=3",), "no layer before the last 3 has keys for full_attention"),
        (("model.num_experts_per_tok=0",), "num_experts_per_tok"),
    ],
)
def test_check_refuses_what_linked_layers_can_not_do(words: tuple[str, ...], text: str) -> None:
    """Pipelines with linked layers, and wrong sizes, are problems in the recipe."""
    sizes = ("model.num_hidden_layers=4", "model.hidden_size=64", "model.num_attention_heads=2")
    graph = Recipe.load("first_run", *FAMILY_WORDS["gemma4"], *sizes, *words).graph
    assert any(text in problem.text for problem in graph.errors), graph.errors


def write(folder: Path, **changes: Any) -> Path:
    config = gemma("gemma4").hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "says vocab_size_per_layer_input = 9"),
        ({"num_kv_shared_layers": 1}, "no layer before the last 1 has keys for full_attention"),
        ({"enable_moe_block": True, "num_experts": 4}, "num_experts_per_tok is missing"),
        ({"layer_types": [FULL, SLIDING]}, "the last layer has a window"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rope_type = 'yarn'"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(Gemma4, write(tmp_path, **changes))
