"""How many bytes the ids of a `tokenizer.json` stand for."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer

TEXT = "Zwölf Boxkämpfer jagen Viktor 😀 quer über den Sylter Deich\n\n  x = 1"


def byte_level(in_decoder: bool) -> Any:
    """Merges over GPT-2's alphabet; the decoder may be a sequence, or missing."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if in_decoder:
        split: Any = pre_tokenizers.Split("x", "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, made.pre_tokenizer])
        made.decoder = decoders.Sequence([decoders.ByteLevel()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    return made


def byte_fallback() -> Any:
    """Return a tokenizer in SentencePiece's style: spaces are ▁, and unknown characters become bytes."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "▁x", "ö"]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [("▁", "x")], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("made", [byte_level(False), byte_level(True), byte_fallback()])
def test_bytes_of_ids_join_to_the_text(made: Any, tmp_path: Path) -> None:
    """
    Ids' bytes join to the text in byte-level and byte-fallback vocabularies; added tokens are text unless special.
    """
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.add_tokens([AddedToken("Übung")])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(path=tmp_path / "tokenizer.json", end_token="<end>")
    tokenizer.open()
    table = tokenizer.token_byte_counts()
    assert table.shape == (tokenizer.vocab_size,) and table[tokenizer.eos_id] == 0
    for text in (TEXT, "x x öx\t😀", "eine Übung", "", "<end>"):
        assert table[tokenizer.encode(text)].sum() == len(text.encode())
