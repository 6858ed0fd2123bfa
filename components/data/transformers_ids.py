"""Comparison with transformers: whether AutoTokenizer gives the ids of a folder's `tokenizer.json`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drawloom.components.data.auto_tokenizer import (
    CLASSES_OF_FILES,
    CONFIG,
    MODEL,
    does_transformers_use_tokenizer_json,
    edit_config_to_use_tokenizer_json,
    read_json_object_or_empty,
)
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


def edit_config_until_ids_match(folder: Path, tokenizer: Tokenizer) -> None:
    """
    Edit a model folder's configuration files until transformers returns the tokenizer's ids; nothing if it does.

    A declared family class stays if it returns the same ids. Logs a warning if the ids still differ.
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
    for text in (*SAMPLES, _sample_vocabulary_text(tokenizer)):
        document = complete_document(tokenizer, tokenizer.encode(text)).tolist()
        other_ids = auto_tokenizer.encode(text)
        our_ids = document[: max(len(other_ids), len(document) - 1 - len(tokenizer.suffix_ids))]
        if our_ids != other_ids:
            name = f"transformers reads it as {type(auto_tokenizer).__name__}"
            return f"{name}, which gives other ids: {_describe_first_differing_id(text, tokenizer, our_ids, other_ids)}"
    return ""


def _sample_vocabulary_text(tokenizer: Tokenizer) -> str:
    """Return evenly spread vocabulary tokens as text, joined by spaces: words in the corpus's language."""
    step = max(1, tokenizer.vocab_size // VOCABULARY_SAMPLES)
    return " ".join(tokenizer.decode([token_id]).strip() for token_id in range(0, tokenizer.vocab_size, step))


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
