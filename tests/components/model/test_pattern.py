"""A model of one's own, whose layers are a pattern of parts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom import Recipe, UserError
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.lfm2 import Lfm2
from drawloom.components.model.pattern import Pattern, parse_pattern
from support.families import CLOSE, assert_generated_as_whole_texts, small
from support.qwen3 import cpu_kernels, logits_of, one_document, whole

DELTA: dict[str, Any] = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def pattern(layers: str, count: int, **changes: Any) -> DecoderBuilder:
    return small(Pattern, layers=layers, num_hidden_layers=count, sliding_window=3, **DELTA, **changes)


def test_patterns_name_a_part_for_every_layer() -> None:
    """A number counts equal parts, which a comma separates."""
    assert parse_pattern("2 x gdn, attention,1x conv") == ["gdn", "gdn", "attention", "conv"]


def test_a_pattern_of_a_family_has_its_numbers() -> None:
    """A pattern with LFM2's parts has LFM2's parameters and logits."""
    torch.manual_seed(0)
    family = small(Lfm2, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, tie_word_embeddings=False)
    module, own = whole(family), whole(pattern("conv, attention", 4, rms_norm_eps=1e-5))
    own.load_state_dict(module.state_dict())
    tokens = torch.randint(29, (2, 9))
    ours, theirs = (logits_of(part, tokens, one_document(2, 9)) for part in (own, module))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_parts_of_a_text_have_its_logits() -> None:
    """Generation token by token, through a layer with every part, equals the whole text."""
    for parts, count in (("gdn, kda, conv, window, attention", 5), ("mamba, attention", 2)):
        assert_generated_as_whole_texts(pattern(parts, count, attention_gate=True))


def test_other_layers_replace_those_of_a_file(tmp_path: Path) -> None:
    """A file's layer count may change without its layer types, and a file of another family is told which ones fit."""
    file = tmp_path / "config.json"
    config = pattern("gdn, attention", 2).hugging_face_config()
    file.write_text(json.dumps(config))
    settings: dict[str, Any] = {"kernels": cpu_kernels(), "config": file}
    assert Pattern(**settings | {"num_hidden_layers": 4}).architecture.num_hidden_layers == 4
    file.write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    with pytest.raises(UserError, match=r"gemma3_text.*config\.json of a drawloom_pattern or qwen3 or llama model"):
        _ = Pattern(**settings).architecture


WORDS = (
    *("model.use=model.pattern", "model.num_hidden_layers=4", "model.hidden_size=32", "model.num_attention_heads=2"),
    *("model.intermediate_size=48", "model.vocab_size=300"),
)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), 'layers is missing; write layers = "3 x gdn, 1 x attention", for example'),
        (("model.layers='3 x gnd, attention'",), "'3 x gnd' is not a part"),
        (("model.layers='2 x gdn, attention'",), "write 6, or another pattern"),
        (("model.layers='3 x gdn, attention'",), "[model] can't be exported"),
        (("model.layers='attention'", "mesh.tensor=3"), "hidden_size = 32 is not divisible by 3"),
    ],
)
def test_check_refuses_what_nothing_can_serve(words: tuple[str, ...], text: str) -> None:
    """A missing or unknown part, a pattern cut off, an export, and a mesh are refused with their place and a remedy."""
    problems = Recipe.load("first_run", *WORDS, *words).graph.errors
    [problem] = [problem for problem in problems if text in f"{problem.text}; {problem.hint}"]
    assert problem.position is not None and problem.hint
