"""dots.llm1 compared with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.dots1 import Dots1
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import UserError
from support.adapted import OneStage
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)
from support.qwen3 import SPARSE_SIZES, whole

SIZES = SPARSE_SIZES | {"num_experts": 8}
KINDS: dict[str, dict[str, Any]] = {
    "two of eight": {},
    "groups, a factor, more shared experts, a dense layer": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": False,
    },
    "a window in the second layer": {"sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses and gradients equal transformers', with a nonzero bias."""
    assert_equal_to_transformers(small(Dots1, **SIZES | KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_logits_of_the_whole_text(kind: str) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(small(Dots1, **SIZES | KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, including the router's bias."""
    assert_files_go_both_ways(small(Dots1, **SIZES | KINDS[kind]), tmp_path)


def test_the_bias_is_exported_in_float32(tmp_path: Path) -> None:
    """A narrow export has a float32 bias like transformers', since bfloat16 would lose the bias's steps."""
    model = small(Dots1, **SIZES)
    module = whole(model)
    write_hugging_face_folder(tmp_path / "narrow", model, OneStage(module), dtype=torch.bfloat16)
    source = open_safetensors_folder(tmp_path / "narrow")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(source.tensor(name), module.get_buffer(name))
    assert {spec.dtype for key, spec in source.specs().items() if "e_score" not in key} == {torch.bfloat16}
    assert json.loads((tmp_path / "narrow/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n_group": 3}, "n_group = 3 does not divide num_experts = 8 into groups of 2 or more"),
        ({"n_group": 8}, "n_group = 8 does not divide"),
        ({"n_group": 2, "topk_group": 3}, "topk_group = 3 is more than n_group = 2"),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            "topk_group = 1 allows 2 experts, fewer than num_experts_per_tok = 3",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace = 2 leaves none of 2 layers with experts"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Settings and config.json are checked alike."""
    with pytest.raises(UserError, match=named):
        _ = small(Dots1, **SIZES | given).architecture
    config = small(Dots1, **SIZES).hugging_face_config() | given
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=named):
        read_config(Dots1, tmp_path)
