"""The command that shows data."""

import json
from pathlib import Path

import pytest

from support.chat import say, tokenizer_folder
from support.runs import drawloom, write_corpus


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with conversations, and a tokenizer with a chat template."""
    write_corpus(tmp_path)
    tokenizer_folder(tmp_path / "tokenizer")
    rows = [json.dumps({"messages": say(f"hello {number}", "good\x1b day")}) for number in range(3)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows), "utf-8")
    return tmp_path


def test_what_is_trained_is_marked(place: Path) -> None:
    """The answer and its end token are, and control tokens are written out; nothing reaches the terminal as such."""
    words = (
        "tokenizer.use=data.hugging_face_tokenizer",
        "tokenizer.path=tokenizer",
        "tokens.use=data.conversations",
        'tokens.paths=["chat.jsonl"]',
        "tokens.validation_fraction=0.0",
    )
    [outcome] = drawloom(place, "data", "show", "tiny.toml", "--rows", "1", *words)
    assert outcome.code == 0, outcome.text
    assert "--- train conversation 0: " in outcome.text and "conversation 1" not in outcome.text
    assert "<|im_start|>user\nhello 0<|im_end|>\n<|im_start|>assistant\n⟦good\\x1b day<|im_end|>⟧" in outcome.text


def test_text_is_trained_but_for_the_first_token_of_a_document(place: Path) -> None:
    """Nothing predicts the first token."""
    [outcome] = drawloom(place, "data", "show", "tiny.toml", "--rows", "1")
    assert outcome.code == 0 and "\nd⟦ef f" in outcome.text, outcome.text
