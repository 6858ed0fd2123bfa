"""OLMo 2 and 3, SmolLM3 and Granite against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.granite import Granite
from drawloom.components.model.olmo2 import Olmo2
from drawloom.components.model.olmo3 import Olmo3
from drawloom.components.model.smollm3 import SmolLm3
from drawloom.graph import UserError
from support.families import (
    assert_all_projections_are_adapted,
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    small,
)

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
KINDS: dict[str, tuple[type[DecoderBuilder], dict[str, Any]]] = {
    "olmo2": (Olmo2, {}),
    "olmo2, every flag": (Olmo2, {"attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}),
    "olmo3": (Olmo3, {"num_hidden_layers": 4, "sliding_window": 4}),
    "olmo3, every flag": (
        Olmo3,
        {"layer_types": [FULL, SLIDING], "sliding_window": 3, "attention_bias": True, "rope_scaling": YARN},
    ),
    "smollm3": (SmolLm3, {"num_hidden_layers": 4}),
    "smollm3, every flag": (
        SmolLm3,
        {
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite": (Granite, {}),
    "granite, every flag": (
        Granite,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def model_of(kind: str) -> DecoderBuilder:
    family, changes = KINDS[kind]
    # These families have no head_dim of their own in transformers.
    return small(family, **{"head_dim": 6} | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, packed documents' losses and gradients equal transformers'."""
    assert_equal_to_transformers(model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(model_of(kind), tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "flag" in kind])
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token equals the whole text, operations are counted, and LoRA finds all projections."""
    model = model_of(kind)
    assert_generated_as_whole_texts(model)
    assert_operations_equal_the_count_of_torch(model)
    assert_all_projections_are_adapted(model)


def write(folder: Path, family: type[DecoderBuilder], **changes: Any) -> Path:
    config = small(family, head_dim=6).hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


def test_smollm3_derives_layers_without_positions_from_an_interval(tmp_path: Path) -> None:
    """As in transformers, the last layer of every interval has no rotary positions."""
    config = read_config(SmolLm3, write(tmp_path, SmolLm3, no_rope_layers="-", no_rope_layer_interval=2))
    assert [config.rope_of(layer) is None for layer in (0, 1)] == [False, True]


def test_olmo3_scales_only_full_attention(tmp_path: Path) -> None:
    """A config of transformers 4 has rope_scaling beside layer types."""
    old = {"rope_parameters": "-", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = read_config(Olmo3, write(tmp_path, Olmo3, layer_types=[SLIDING, FULL], **old))
    assert [rope.scaling is None for layer in (0, 1) if (rope := config.rope_of(layer))] == [True, False]


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        (SmolLm3, {"no_rope_layers": [1]}, "no_rope_layers has 1 numbers, and num_hidden_layers = 2"),
        (
            Olmo3,
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 5e5}}},
            "has rope_theta = 10000.0 for sliding and 500000.0 for full attention",
        ),
        (Granite, {"logits_scaling": 0}, "an invalid logits_scaling: 0.0 is not above 0"),
    ],
)
def test_other_configs_are_refused(
    family: type[DecoderBuilder], changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(family, write(tmp_path, family, **changes))
