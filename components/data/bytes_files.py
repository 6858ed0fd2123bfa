"""The byte-level tokenizer's files, for Hugging Face's libraries."""

import json
from pathlib import Path
from typing import Any


def write_tokenizer_files(folder: Path, end_name: str, end: int) -> None:
    """Write `tokenizer.json`, a byte-pair encoding without merges, and its config, with the id `end` for ends."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_list_gpt2_byte_characters())} | {end_name: end}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_name,
        "split_special_tokens": True,
        # without this, decoding would drop spaces before punctuation
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _list_gpt2_byte_characters() -> list[str]:
    """
    Return GPT-2's characters by byte: the byte itself if it is printable, otherwise the next character from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    remapped = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + remapped.index(byte)) for byte in range(256)]
