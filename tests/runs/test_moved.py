"""A run folder holds everything that its checkpoints need: it works from any directory, and after a move."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from support.runs import drawloom, write_corpus

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MODEL = """
extends = "pretrain"

[run]
name = "tiny"

[vars]
length = 32

[corpus]
use = "data.text_files"
paths = ["corpus/*.py"]

[tokenizer]
use = "data.hugging_face_tokenizer"
path = "parts/tokenizer.json"
end_token = "<end>"

[model]
use = "model.qwen3.dense"
config = "parts"

[batch]
global_size = 4
micro_size = 4

[trainer]
steps = 2
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a corpus, a recipe, and a tokenizer and a config that the recipe names."""
    write_corpus(tmp_path)
    (tmp_path / "parts").mkdir()
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "parts/tokenizer.json"))
    (tmp_path / "parts/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mine.toml").write_text(MODEL)
    return tmp_path


def test_a_moved_run_is_used_without_the_files_that_it_was_made_from(place: Path) -> None:
    """`generate`, `export` and `verify` work from another directory when tokenizer and config are gone."""
    [done] = drawloom(place, "run", "mine.toml")
    assert done.code == 0, done.text
    other = place / "elsewhere"
    other.mkdir()
    (place / "runs/tiny").rename(other / "kept")
    (place / "parts").rename(place / "gone")
    for command in (
        ("generate", "kept", "--prompt", "def ", "--tokens", "4"),
        ("export", "kept", "--to", "whole"),
        ("verify", "kept"),
    ):
        [found] = drawloom(other, *command)
        assert found.code == 0, found.text
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (other / "whole" / name).read_bytes() == (other / "kept/export" / name).read_bytes()
