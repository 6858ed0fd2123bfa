"""MiniMax M2 against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.minimax_m2 import MiniMaxM2
from drawloom.graph import UserError
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12, "router_aux_loss_coef": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "minimax_m2": {},
    "whole heads are rotated": {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-3},
}


def minimax(kind: str) -> DecoderBuilder:
    return small(MiniMaxM2, **SIZES | KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Logits, losses of packed documents and all gradients equal transformers', and files go both ways."""
    assert_equal_to_transformers(minimax(kind), by_files=str)
    assert_files_go_both_ways(minimax(kind), tmp_path, by_files=True)


def test_parts_of_a_text_have_its_logits() -> None:
    """Generation token by token equals the whole text."""
    assert_generated_as_whole_texts(minimax("minimax_m2"))


def test_published_rotary_dim_is_read(tmp_path: Path) -> None:
    """Published configs say how many channels of a head are rotated; noise in routers is refused."""
    config = minimax("minimax_m2").hugging_face_config()
    del config["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_dim": 2}))
    assert read_config(MiniMaxM2, tmp_path).rotary_dim == 2
    (tmp_path / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.1}))
    with pytest.raises(UserError, match="says router_jitter_noise = 0"):
        read_config(MiniMaxM2, tmp_path)
