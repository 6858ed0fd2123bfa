"""Byte-level tokenizer: every UTF-8 byte is a token, and one more token ends a document."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drawloom import UserError, component

END = 256
END_NAME = "<|end|>"


@component
class Bytes:
    """Byte-level tokenizer: ids 0 to 255 are bytes, id 256 ends a document."""

    @property
    def vocab_size(self) -> int:
        """All byte values plus the end token: 257."""
        return END + 1

    @property
    def eos_id(self) -> int:
        """The end token, 256."""
        return END

    @property
    def prefix_ids(self) -> Sequence[int]:
        """None: documents and prompts begin with their text."""
        return ()

    @property
    def suffix_ids(self) -> Sequence[int]:
        """None: the end token follows a document's text."""
        return ()

    def encode(self, text: str) -> np.ndarray:
        """Return a text's UTF-8 bytes, int32 (bytes,). Raises UserError for half a surrogate pair."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text: character {error.start} is half of a surrogate pair; remove it") from error
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as text. Invalid UTF-8 becomes U+FFFD; ids that are not bytes are skipped."""
        return bytes(token_id for token_id in ids if 0 <= token_id < END).decode("utf-8", "replace")

    def token_byte_counts(self) -> np.ndarray:
        """Return 1 for bytes and 0 for the end token; int64 (257,)."""
        return np.append(np.ones(END, np.int64), 0)

    def save(self, folder: Path) -> None:
        """
        Write `tokenizer.json` and `tokenizer_config.json` for Hugging Face's libraries.

        The end token is in the vocabulary but not among the added tokens, and `split_special_tokens` is set: a
        text that contains `<|end|>` is encoded as bytes and can't forge a document's end. In a model
        folder transformers may need more files, see `edit_config_to_use_tokenizer_json`.
        """
        from drawloom.components.data.auto_tokenizer import edit_config_to_use_tokenizer_json

        _write_json(folder / "tokenizer.json", _make_tokenizer_json())
        _write_json(folder / "tokenizer_config.json", _make_tokenizer_config())
        edit_config_to_use_tokenizer_json(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _make_tokenizer_config() -> dict[str, Any]:
    """Return the content for `tokenizer_config.json`."""
    # without this cleanup setting, decoding would drop spaces before punctuation
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_NAME,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }


def _make_tokenizer_json() -> dict[str, Any]:
    """Return the content for `tokenizer.json`: a byte-pair encoding without merges, so every byte is a token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_list_gpt2_byte_characters())} | {END_NAME: END}
    return {
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


def _list_gpt2_byte_characters() -> list[str]:
    """
    Return GPT-2's characters by byte: the byte itself if it is printable, otherwise the next character from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    remapped = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + remapped.index(byte)) for byte in range(256)]
