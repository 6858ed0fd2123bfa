"""
Trained tokenizer: a `tokenizer.json`, read by the package `tokenizers`.

A folder's tokenizer is compared with transformers, whose AutoTokenizer may give other ids than the file.
"""

import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from drawloom import UserError, component, internal, setting
from drawloom.components.data.auto_tokenizer import (
    CLASSES_OF_FILES,
    CONFIG,
    MODEL,
    does_transformers_use_tokenizer_json,
    edit_config_to_use_tokenizer_json,
    read_json_object_or_empty,
    read_special_tokens,
)
from drawloom.components.data.chat.template import list_chat_template_files, read_chat_templates
from drawloom.ports import Tokenizer, complete_document

log = logging.getLogger("drawloom.data")

SAMPLES = (
    "In 2024, 1234567890 people paid 3.14 or 1,000,000.00; room 007 is on the 42nd floor.",
    "two  spaces,   three,\ttab,\r\n\r\n  an indented line \n\n\n and a space at the end ",
    " leading space",
    "I'll say they're DON'T-like; isn't `f(x) != 'y'` fine? snake_case camelCase http://a.b/c?d=e&f=1%20",
    "é e\u0301 ﬁ ﬀ Å \u212b ½ ² Ⅷ １２３ ٣٤٥ ǅ ß İ",
    "naïve Ünïcödé, Привет мир, 你好，世界。 こんにちは 안녕하세요 שלום नमस्ते ไทย",
    "😀 👩‍👩‍👧 🇫🇷 → ∑ x² ≤ ∞ \u00a0\u2003\u200b\ufeff \x00\x7f",
)
"""Texts that similar tokenizers encode differently: digits, spaces, contractions, Unicode."""

VOCABULARY_SAMPLES = 512
"""Count for evenly spread vocabulary tokens whose texts form one more sample."""


def warn_if_transformers_ids_differ(folder: Path, tokenizer: Tokenizer) -> None:
    """Warn if transformers would encode differently from a tokenizer in a model folder."""
    if not (folder / MODEL).is_file() or does_transformers_use_tokenizer_json(folder):
        return
    if difference := describe_difference_from_transformers_ids(folder, tokenizer):
        log.warning(
            "%s: %s; if the model was trained with these, save the tokenizer as transformers reads it, by "
            'AutoTokenizer.from_pretrained("%s").save_pretrained("tokenizer"), and write path = "tokenizer"',
            *(folder, difference, folder),
        )


def ensure_transformers_ids_match(folder: Path, tokenizer: Tokenizer) -> None:
    """
    Make transformers read a model folder's `tokenizer.json` unchanged, unless it returns the tokenizer's ids already.

    A declared family class stays if it returns the same ids; a generic class is one of CLASSES_OF_FILES, and is edited
    without a comparison, where transformers would ignore it. Logs a warning if the ids differ in the end.
    """
    is_generic = read_json_object_or_empty(folder / CONFIG).get("tokenizer_class") in CLASSES_OF_FILES
    if not is_generic and not describe_difference_from_transformers_ids(folder, tokenizer):
        return
    edit_config_to_use_tokenizer_json(folder)
    if difference := describe_difference_from_transformers_ids(folder, tokenizer):
        log.warning("the tokenizer is saved, but %s; do not use the model with transformers' tokenizer", difference)


def describe_difference_from_transformers_ids(folder: Path, tokenizer: Tokenizer) -> str:
    """
    Compare a tokenizer's documents with the ids from transformers' AutoTokenizer for a folder; the end may be missing.

    Returns a description of the difference; empty if all samples agree, or if transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return ""
    try:
        with _silence_transformers():
            auto_tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds: a missing package, an unexpected value
        return f"transformers can't read it ({type(error).__name__}: {error})"
    # Evenly spread tokens of the vocabulary are words in the corpus's language.
    sampled = range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // VOCABULARY_SAMPLES))
    for text in (*SAMPLES, " ".join(tokenizer.decode([token_id]).strip() for token_id in sampled)):
        document = complete_document(tokenizer, tokenizer.encode(text)).tolist()
        other_ids = auto_tokenizer.encode(text)
        our_ids = document[: max(len(other_ids), len(document) - 1 - len(tokenizer.suffix_ids))]
        if our_ids != other_ids:
            name = f"transformers reads it as {type(auto_tokenizer).__name__}"
            return f"{name}, which gives other ids: {_describe_first_differing_id(text, tokenizer, our_ids, other_ids)}"
    return ""


def _describe_first_differing_id(text: str, tokenizer: Tokenizer, our_ids: list[int], other_ids: list[int]) -> str:
    """Describe the first difference: both token counts, and the text around the first different id."""
    first = next((index for index, pair in enumerate(zip(our_ids, other_ids, strict=False)) if pair[0] != pair[1]), 0)
    text_around = tokenizer.decode(our_ids[max(0, first - 2) : first + 4])
    return f"{len(other_ids)} tokens for {len(our_ids)} of tokenizer.json in a sample, near {text_around!a}"


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silence transformers' advice about tokenizer classes: the comparison replaces it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


COMPANIONS = (CONFIG, "special_tokens_map.json")
"""Other tokenizer files that transformers reads from the same folder, beside chat templates."""

MODEL_FILES = ("generation_config.json", "config.json")
"""A model's files with one or several end tokens."""

BYTE = re.compile("<0x[0-9A-F]{2}>")

ENCODING = threading.Lock()
"""Lock for encoding: a flag on the tokenizer says whether control tokens in a text are read."""

log = logging.getLogger("drawloom.data")


class AddedIds(NamedTuple):
    """Ids around a text, added by a tokenizer's post-processor."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@component(needs={"tokenizers": "drawloom[tokenizers]"})
class HuggingFaceTokenizer:
    """
    Tokenizer from a `tokenizer.json`.

    Documents and prompts begin as the file's post-processor says: models such as Llama 3 and Gemma need their BOS
    token. A special token spelled out in a text is encoded as text: no document can forge an end. BPE dropout is
    switched off: a text would have other ids at every start.
    """

    path: Path = setting("path of `tokenizer.json` or its folder, relative to the current directory")
    end_token: str | None = setting(
        "end-of-document token, as spelled in the file; default: eos_token of `tokenizer_config.json`", default=None
    )
    begin_token: str | None = setting(
        'first token of documents and prompts (BOS), as spelled in the file; "": none; default: as the file\'s '
        "post-processor says",
        default=None,
    )
    _dropout: float | None = internal(None)

    def open(self) -> None:
        """
        Read the file once.

        Logs a warning if the file has BPE dropout, or if it is in a model folder, and transformers returns other ids
        for this folder.
        """
        self.check_before_open()
        if self._dropout:
            text = "%s: BPE dropout of %g is off, also in exports: a text would have other ids every time"
            log.warning(text, self._tokenizer_file, self._dropout)
        elif self.begin_token is None:
            warn_if_transformers_ids_differ(self._tokenizer_file.parent, self)

    def check_before_open(self) -> None:
        """Read the file. Raises UserError if the package, the file, the end token or the begin token is missing."""
        _ = self.eos_id, self.prefix_ids

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer in the file, read once, without BPE dropout."""
        tokenizer = read_tokenizer(self._tokenizer_file)
        if isinstance(tokenizer.model, _import_tokenizers().models.BPE):
            self._dropout, tokenizer.model.dropout = tokenizer.model.dropout, None
        return tokenizer

    @cached_property
    def _eos_token(self) -> str:
        """Return the end-of-document token; raises UserError if nothing declares one."""
        token = self.end_token or self.special_tokens_by_name.get("eos_token")
        if token is None:
            where = f"{self._tokenizer_file.parent / CONFIG} has no eos_token"
            raise UserError(f"end_token: it is not set, and {where}; {_suggest_special_tokens(self._tokenizer)}")
        return token

    @property
    def _tokenizer_file(self) -> Path:
        """Path to `tokenizer.json`."""
        return self.path / "tokenizer.json" if self.path.is_dir() else self.path

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one, added tokens included; ids in between may be unused."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @cached_property
    def eos_id(self) -> int:
        """The id of `end_token`."""
        return self._find_id("end_token", self._eos_token)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The id for `begin_token`, or the post-processor's ids before a text."""
        if self.begin_token is None:
            return self._added_ids.before
        return (self._find_id("begin_token", self.begin_token),) if self.begin_token else ()

    @cached_property
    def suffix_ids(self) -> tuple[int, ...]:
        """The post-processor's ids after a text, without the end token if this is the last."""
        after = self._added_ids.after
        return after[:-1] if after[-1:] == (self.eos_id,) else after

    @cached_property
    def _added_ids(self) -> AddedIds:
        """The file's post-processor's ids."""
        return find_added_ids(self._tokenizer)

    def _find_id(self, setting_name: str, token: str) -> int:
        """Return a token's id. Raises UserError with the setting's name if there is no such token."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            where = f'{setting_name}: {self._tokenizer_file} has no token "{token}"'
            raise UserError(f"{where}; {_suggest_special_tokens(self._tokenizer)}")
        return int(token_id)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """`eos_id`, and eos_token_id of `generation_config.json` and `config.json` beside the file."""
        ends = {self.eos_id}
        for name in MODEL_FILES:
            ends |= read_eos_ids(self._tokenizer_file.parent / name)
        return frozenset(end for end in ends if end < self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        with ENCODING:
            return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        except TypeError as error:
            raise UserError("text: it contains half of a surrogate pair; remove it") from error

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The templates in files or `tokenizer_config.json` beside the file, by name."""
        return read_chat_templates(self._tokenizer_file.parent)

    @property
    def special_tokens_by_name(self) -> Mapping[str, str]:
        """The special tokens in `tokenizer_config.json`, by name."""
        return read_special_tokens(self._tokenizer_file.parent)

    @property
    def control_tokens(self) -> list[str]:
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    def encode_with_control_tokens(self, text: str) -> np.ndarray:
        with ENCODING:
            self._tokenizer.encode_special_tokens = False
            try:
                return self._encode(text)
            finally:
                self._tokenizer.encode_special_tokens = True

    def decode_with_control_tokens(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts, int32 (tokens,); faster than `encode` in a loop."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as text, without special tokens."""
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def token_byte_counts(self) -> np.ndarray:
        """
        Return each id's byte count, from the vocabulary: int64 (vocab_size,).

        A token in a byte-level vocabulary has one byte per character. In other vocabularies a token is its own
        text: the byte fallback spells one byte as `<0x0A>`, and SentencePiece spells a space as `▁`. Special
        tokens and unused ids have no bytes. Bytes added or dropped by a normalizer or pre-tokenizer, such as a
        space before the first word, are counted as in the ids.
        """
        table = np.zeros(self.vocab_size, np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        # A byte-level decoder or pre-tokenizer spells tokens in GPT-2's byte alphabet.
        parts = [part for part in (self._tokenizer.decoder, self._tokenizer.pre_tokenizer) if part is not None]
        is_byte_level = any(b'"ByteLevel"' in part.__getstate__() for part in parts)
        for token, token_id in self._tokenizer.get_vocab().items():
            if token_id in added:
                table[token_id] = 0 if added[token_id].special else len(added[token_id].content.encode())
            else:
                table[token_id] = len(token) if is_byte_level else _count_sentencepiece_bytes(token)
        return table

    def list_input_files(self) -> dict[str, list[Path]]:
        """Return the file, the companion files that transformers reads, and files with end tokens."""
        models = [self._tokenizer_file.parent / name for name in MODEL_FILES]
        return {"path": [self._tokenizer_file, *self._companions, *(path for path in models if path.is_file())]}

    @property
    def _companions(self) -> list[Path]:
        """Existing companion files, for transformers."""
        folder = self._tokenizer_file.parent
        files = [folder / name for name in COMPANIONS]
        return [*(path for path in files if path.is_file()), *list_chat_template_files(folder)]

    def save(self, folder: Path) -> None:
        """
        Copy the file and its companions. In a model folder, change them so that transformers returns the same
        ids.

        The copy has no BPE dropout, and its post-processor adds `begin_token`. Logs a warning if transformers still
        returns other ids.
        """
        (folder / "tokenizer.json").write_bytes(self._read_file_with_edits())
        for path in self._companions:
            copy = folder / path.relative_to(self._tokenizer_file.parent)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        if not (folder / CONFIG).is_file():
            config = {"tokenizer_class": CLASSES_OF_FILES[0], "eos_token": self._eos_token}
            (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if (folder / "config.json").is_file():
            ensure_transformers_ids_match(folder, self)

    def _read_file_with_edits(self) -> bytes:
        """Return the file's content, changed only if it would give other ids than this tokenizer."""
        content = self._tokenizer_file.read_bytes()
        is_prefix_kept = self.prefix_ids == self._added_ids.before
        if is_prefix_kept and not self._dropout:
            return content
        edited = json.loads(content)
        if self._dropout:
            edited["model"]["dropout"] = None
        if not is_prefix_kept:
            edited["post_processor"] = self._make_post_processor(AddedIds(self.prefix_ids, self._added_ids.after))
        return (json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode()

    def _make_post_processor(self, added: AddedIds) -> dict[str, Any]:
        """Return a post-processor that adds ids to a text, for `tokenizer.json`."""
        names = {token_id: self._tokenizer.id_to_token(token_id) for token_id in (*added.before, *added.after)}
        before, after = (
            [{"SpecialToken": {"id": names[token_id], "type_id": 0}} for token_id in ids]
            for ids in (added.before, added.after)
        )
        texts = {name: [*before, {"Sequence": {"id": name, "type_id": 0}}, *after] for name in ("A", "B")}
        tokens = {name: {"id": name, "ids": [token_id], "tokens": [name]} for token_id, name in names.items()}
        pair = [*texts["A"], *texts["B"]]
        return {"type": "TemplateProcessing", "single": texts["A"], "pair": pair, "special_tokens": tokens}


def find_added_ids(tokenizer: Any) -> AddedIds:
    """Return a post-processor's ids before and after a text."""
    if not tokenizer.num_special_tokens_to_add(is_pair=False):
        return AddedIds((), ())
    for text in tokenizer.get_vocab():  # any other text may be refused
        encoding = tokenizer.encode(text)
        indices = [index for index, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        if indices:  # the text has an id
            return AddedIds(tuple(encoding.ids[: indices[0]]), tuple(encoding.ids[indices[-1] + 1 :]))
    return AddedIds((), ())


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a file, without truncation and padding; it encodes special tokens in a text as text."""
    tokenizer_class = _import_tokenizers().Tokenizer
    if not path.is_file():
        raise UserError(f"path: there is no file {path}; write the path of a `tokenizer.json`")
    try:
        tokenizer = tokenizer_class.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"path: {path} is not a tokenizer ({error}); write the path of a `tokenizer.json`") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_eos_ids(path: Path) -> set[int]:
    """Return eos_token_id in a model's configuration file, one id or a list; empty without any."""
    config = read_json_object_or_empty(path)
    text_config = config.get("text_config")
    ids = config.get("eos_token_id", text_config.get("eos_token_id") if isinstance(text_config, dict) else None)
    return {end for end in (ids if isinstance(ids, list) else [ids]) if type(end) is int and end >= 0}


def _count_sentencepiece_bytes(token: str) -> int:
    """Return a token's bytes of text: `▁` is a space, and a byte fallback such as `<0x0A>` is one byte."""
    return 1 if BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())


def _import_tokenizers() -> Any:
    """Import the package `tokenizers`. Raises UserError with an installation hint if it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        hint = "pip install 'drawloom[tokenizers]'"
        raise UserError(f"data.hugging_face_tokenizer: the package `tokenizers` is missing; {hint}") from error
    return tokenizers


def _suggest_special_tokens(tokenizer: Any) -> str:
    """Return a remedy for messages, with the special tokens to choose from."""
    special = [f'"{token.content}"' for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return f"write one of {', '.join(special)}" if special else "write one of its tokens"
