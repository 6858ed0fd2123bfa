"""Phi-3 and Phi-4-mini against transformers."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.phi3 import Phi3
from drawloom.graph import UserError
from drawloom.kernels.rope.frequencies import document_length_by_token
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    small,
)

LONG = RopeScaling(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.3],
    long_factor=[1.0, 2.0, 5.0],
    original_max_position_embeddings=10,
)
SIZES: dict[str, Any] = {"hidden_size": 32, "max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "phi3": SIZES,
    # The second of two packed documents is long, and the first is not.
    "phi4_mini": SIZES
    | {
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONG,
        "rope_theta": 100.0,
        "sliding_window": 6,
        "tie_word_embeddings": True,
    },
}


def phi(kind: str, **changes: Any) -> Phi3:
    return small(Phi3, **KINDS[kind] | changes)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, gradients, and losses with packed documents."""
    assert_equal_to_transformers(phi(kind))
    assert_operations_equal_the_count_of_torch(phi(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, in which projections are joined."""
    assert_files_go_both_ways(phi(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token equals the whole text up to the original length, beyond which frequencies change."""
    assert_generated_as_whole_texts(phi(kind), length=10)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"resid_pdrop": 0.1}, "says resid_pdrop = 0.1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn', and transformers has only longrope"),
        ({"partial_rotary_factor": 0.4}, "rotates 3 channels of head_dim = 8"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """A config that would be built as something near it is refused with its key."""
    config = phi("phi3").hugging_face_config() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=text):
        read_config(Phi3, tmp_path)


def test_first_name_of_longrope_is_read(tmp_path: Path) -> None:
    """Early files for Phi-3 with 128k tokens say `su`, and scale attention by a factor."""
    model = phi("phi4_mini")
    config: dict[str, Any] = model.hugging_face_config()
    rope = config.pop("rope_parameters")
    del rope["rope_type"], rope["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope | {"type": "su", "factor": 4.0}}))
    read = read_config(Phi3, tmp_path)
    assert read.rope_scaling is not None
    assert read.rope_scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(10)))
    assert attrs.evolve(read, rope_scaling=LONG) == model.architecture


def test_a_long_document_does_not_change_the_frequencies_in_a_short_one() -> None:
    """Document lengths come from positions, inside a row with a long document."""
    positions = torch.tensor([[*range(4), *range(12), *range(3)]])
    assert document_length_by_token(positions).tolist() == [[4] * 4 + [12] * 12 + [3] * 3]
    assert document_length_by_token(positions[:, 6:8]).tolist() == [[4, 4]]  # new tokens of a text with a cache
