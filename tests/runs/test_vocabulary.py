"""Tokenizers and models that do not fit each other."""

from pathlib import Path

from support.runs import drawloom, rows, write_corpus

WITHOUT_TOKENIZER = """
extends = "tiny.toml"
unset = ["tokenizer", "sample"]

[tokens]
tokenizer = { use = "data.bytes" }

[model]
vocab_size = 100

[trainer]
on_finish = []
"""


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """A model with a smaller vocabulary than its tokenizer is refused before the first step."""
    write_corpus(tmp_path)
    (tmp_path / "small.toml").write_text(WITHOUT_TOKENIZER, "utf-8")
    [refused] = drawloom(tmp_path, "run", "small.toml", "trainer.steps=1")
    assert refused.code == 2 and "Traceback" not in refused.text, refused.text
    assert refused.text.endswith(
        "the tokenizer has 257 ids, but the model's vocabulary only 100; "
        "write vocab_size = 257 in the model, or use another tokenizer (DL403)\n"
    )
    [done] = drawloom(tmp_path, "run", "small.toml", "model.vocab_size=257", "trainer.steps=1")
    assert done.code == 0 and len(rows(tmp_path / "runs/tiny")) == 1, done.text
