"""A trained tokenizer: a `tokenizer.json`, read by the package `tokenizers`."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from drawloom.components.data.auto_tokenizer import CLASSES_OF_FILES, make_ids_agree, warn_of_other_ids
from drawloom.components.data.chat.template import template_of
from drawloom.graph import UserError, component, setting

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Further files of a tokenizer that `transformers` reads from the same folder."""

BYTE = re.compile("<0x[0-9A-F]{2}>")


@component(needs={"tokenizers": "drawloom[tokenizers]"})
class HuggingFaceTokenizer:
    """
    Encodes with a `tokenizer.json`, without adding special tokens around a text.

    A special token that is spelled out in a text is encoded as text: no document can forge an end.
    """

    path: Path = setting(doc="the `tokenizer.json` or its folder, relative to the current directory")
    end_token: str | None = setting(
        default=None,
        doc="the token that ends a document, as the file writes it; eos_token of `tokenizer_config.json` if left out",
    )

    def open(self) -> None:
        """
        Read the file, unless it has been read.

        Warns if the file is in a model's folder, and transformers gives other ids with this folder.
        """
        self.check_machine()
        warn_of_other_ids(self._file.parent, self)

    def check_machine(self) -> None:
        """Read the file. Raises UserError if the package, the file or the end token is missing."""
        _ = self.eos_id

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._file)

    @cached_property
    def _end_token(self) -> str:
        """Return the end token of a document; raises UserError if nothing declares one."""
        token = self.end_token or eos_token(self._file.parent)
        if token is None:
            where = f"{self._file.parent / COMPANIONS[0]} says no eos_token"
            raise UserError(f"end_token: {where}, and it is left out; {_candidates(self._tokenizer)}")
        return token

    @property
    def _file(self) -> Path:
        return self.path / "tokenizer.json" if self.path.is_dir() else self.path

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included; ids in between may be unused."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @cached_property
    def eos_id(self) -> int:
        """The id of `end_token`."""
        tokenizer, token = self._tokenizer, self._end_token
        number = tokenizer.token_to_id(token)
        if number is None:
            raise UserError(f'end_token: {self._file} has no token "{token}"; {_candidates(tokenizer)}')
        return int(number)

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 of shape (tokens,), without the end."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    @property
    def chat_template(self) -> str | None:
        """That of `chat_template.jinja` or `tokenizer_config.json`, beside the file."""
        return template_of(self._file.parent)[0]

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """Those of `tokenizer_config.json`."""
        return template_of(self._file.parent)[1]

    @property
    def control_tokens(self) -> list[str]:
        """The special tokens of the file."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    def encode_control(self, text: str) -> np.ndarray:
        """The ids of a text in which special tokens are written out, int32 (tokens,)."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode_control(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens written out."""
        return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 (tokens,); faster than one at a time."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are skipped."""
        return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True))

    def token_bytes(self) -> np.ndarray:
        """
        How many bytes each id stands for, from the vocabulary: int64 (vocab_size,).

        With a byte-level vocabulary a token has a byte for each character. In others a token is its own text: `<0x0A>`
        is the one byte that a byte fallback writes so, and `▁` the space that SentencePiece writes so. Special tokens
        and unused ids have none. What a normalizer or pre-tokenizer adds or drops, such as a space before the first
        word, is counted as the ids have it.
        """
        table = np.zeros(self.vocab_size, np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        is_byte_level = _is_byte_level(self._tokenizer)
        for token, number in self._tokenizer.get_vocab().items():
            if number in added:
                table[number] = 0 if added[number].special else len(added[number].content.encode())
            else:
                table[number] = len(token) if is_byte_level else len(_as_text(token).encode())
        return table

    def files_read(self) -> dict[str, list[Path]]:
        """The file and its companions that `transformers` reads."""
        companions = [self._file.parent / name for name in COMPANIONS]
        return {"path": [self._file, *(path for path in companions if path.is_file())]}

    def save(self, folder: Path) -> None:
        """
        Copy the file and its companions, changed so that transformers gives the same ids in a model's folder.

        Warns if transformers gives others nevertheless.
        """
        source, *companions = self.files_read()["path"]
        shutil.copyfile(source, folder / "tokenizer.json")
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        if not (folder / COMPANIONS[0]).is_file():
            config = {"tokenizer_class": CLASSES_OF_FILES[0], "eos_token": self._end_token}
            (folder / COMPANIONS[0]).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if (folder / "config.json").is_file():
            make_ids_agree(folder, self)


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, without truncation and padding; special tokens in a text are encoded as text."""
    kind = _package().Tokenizer
    if not path.is_file():
        raise UserError(f"path: there is no file {path}; write the path of a `tokenizer.json`")
    try:
        tokenizer = kind.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"path: {path} is not a tokenizer ({error}); write the path of a `tokenizer.json`") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def eos_token(folder: Path) -> str | None:
    """The token that `tokenizer_config.json` says ends a text, if it says one."""
    try:
        found = json.loads((folder / COMPANIONS[0]).read_text("utf-8")).get("eos_token")
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    text = found.get("content") if isinstance(found, dict) else found  # transformers 4 writes an object
    return text if isinstance(text, str) else None


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are written in GPT-2's alphabet of bytes; the decoder may be one of a sequence."""
    parts = (tokenizer.decoder, tokenizer.pre_tokenizer)
    return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)


def _as_text(token: str) -> str:
    """The text of a token, with any one byte in place of one that a byte fallback stands for."""
    return "?" if BYTE.fullmatch(token) else token.replace("▁", " ")


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        hint = "pip install 'drawloom[tokenizers]'"
        raise UserError(f"data.hugging_face_tokenizer: the package `tokenizers` is missing; {hint}") from error
    return tokenizers


def _candidates(tokenizer: Any) -> str:
    special = [f'"{token.content}"' for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return f"write one of {', '.join(special)}" if special else "write one of its tokens"
