"""Byte-level tokenizer: every UTF-8 byte is a token, and one more token ends a document."""

from collections.abc import Sequence
from pathlib import Path

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
        from drawloom.components.data.bytes_files import write_tokenizer_files

        write_tokenizer_files(folder, END_NAME, END)
        edit_config_to_use_tokenizer_json(folder)
