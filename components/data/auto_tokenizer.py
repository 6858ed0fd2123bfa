"""Agreement with transformers: whether its AutoTokenizer gives the ids of a folder's `tokenizer.json`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawloom.components.ports.corpus import Tokenizer

CONFIG, MODEL = "tokenizer_config.json", "config.json"

log = logging.getLogger("drawloom.data")

CLASSES_OF_FILES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that reads `tokenizer.json` unchanged, in transformers 4 and 5."""

REBUILT = ("qwen2",)
"""Of our families, the `model_type` for which transformers 5 ignores the class that a folder declares
(MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in its tokenization_auto.py): Qwen2Tokenizer replaces normalizer and
pre-tokenizer. It heeds the class of a folder that names code of its own, and runs this code only on request."""

AUTO_MAP = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
CODE_FILE = "own_tokenizer.py"
CODE = '''"""The tokenizer of `tokenizer.json`, unchanged: transformers 5 would rebuild it as Qwen2's."""

from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
'''

SAMPLES = (
    "In 2024, 1234567890 people paid 3.14 or 1,000,000.00; room 007 is on the 42nd floor.",
    "two  spaces,   three,\ttab,\r\n\r\n  an indented line \n\n\n and a space at the end ",
    " leading space",
    "I'll say they're DON'T-like; isn't `f(x) != 'y'` fine? snake_case camelCase http://a.b/c?d=e&f=1%20",
    "é e\u0301 ﬁ ﬀ Å \u212b ½ ² Ⅷ １２３ ٣٤٥ ǅ ß İ",
    "naïve Ünïcödé, Привет мир, 你好，世界。 こんにちは 안녕하세요 שלום नमस्ते ไทย",
    "😀 👩‍👩‍👧 🇫🇷 → ∑ x² ≤ ∞ \u00a0\u2003\u200b\ufeff \x00\x7f",
)
"""Texts on which tokenizers that are nearly the same differ: digits, spaces, contractions, Unicode."""

VOCABULARY_SAMPLES = 512
"""Tokens of the vocabulary, evenly spread, whose texts make one more sample."""


def warn_of_other_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Warn if a model's folder has a tokenizer of which transformers makes another one."""
    if not (folder / MODEL).is_file() or is_read_unchanged(folder):
        return
    if difference := find_difference(folder, tokenizer):
        log.warning(
            "%s: %s; if the model was trained with these, save the tokenizer as transformers reads it, by "
            'AutoTokenizer.from_pretrained("%s").save_pretrained("tokenizer"), and write path = "tokenizer"',
            *(folder, difference, folder),
        )


def make_ids_agree(folder: Path, tokenizer: Tokenizer) -> None:
    """
    Change the configuration in a model's folder, if need be, so that transformers gives a tokenizer's ids.

    A class of a family stays declared if it gives the same ids. Warns if ids differ nevertheless.
    """
    is_generic = _read(folder / CONFIG).get("tokenizer_class") in CLASSES_OF_FILES
    if not is_generic and not find_difference(folder, tokenizer):
        return
    make_read_unchanged(folder)
    if difference := find_difference(folder, tokenizer):
        log.warning("the tokenizer is saved, but %s; do not use the model with these", difference)


def is_read_unchanged(folder: Path) -> bool:
    """Whether transformers reads a folder's `tokenizer.json` unchanged, judging by the folder's configurations."""
    config = _read(folder / CONFIG)
    names_code = config.get("auto_map") == AUTO_MAP and (folder / CODE_FILE).is_file()
    return config.get("tokenizer_class") in CLASSES_OF_FILES and (names_code or not _is_rebuilt(folder))


def make_read_unchanged(folder: Path) -> None:
    """Make transformers read `tokenizer.json` unchanged, by the folder's `tokenizer_config.json`."""
    if is_read_unchanged(folder):
        return
    config = _read(folder / CONFIG) | {"tokenizer_class": CLASSES_OF_FILES[0]}
    if _is_rebuilt(folder):
        (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
        config["auto_map"] = AUTO_MAP
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_rebuilt(folder: Path) -> bool:
    """Whether transformers ignores the class declared by a folder, for the family of the folder's model."""
    return _read(folder / MODEL).get("model_type") in REBUILT


def find_difference(folder: Path, tokenizer: Tokenizer) -> str:
    """
    Compare a tokenizer's ids with those of transformers' AutoTokenizer, which reads a folder.

    Returns how they differ; empty if they do not on any sample, or if transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return ""
    try:
        with _quiet_transformers():
            theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of many kinds: a missing package, a value that it does not expect
        return f"transformers can't read it ({type(error).__name__}: {error})"
    for text in (*SAMPLES, _vocabulary_sample(tokenizer)):
        ours, others = tokenizer.encode(text).tolist(), theirs.encode(text, add_special_tokens=False)
        if ours != others:
            name = f"transformers reads it as {type(theirs).__name__}"
            return f"{name}, which gives other ids: {_first_change(text, tokenizer, ours, others)}"
    return ""


def _vocabulary_sample(tokenizer: Tokenizer) -> str:
    """Texts of tokens from all of the vocabulary, separated by spaces: words of the corpus, in its language."""
    step = max(1, tokenizer.vocab_size // VOCABULARY_SAMPLES)
    return " ".join(tokenizer.decode([number]).strip() for number in range(0, tokenizer.vocab_size, step))


def _first_change(text: str, tokenizer: Tokenizer, ours: list[int], others: list[int]) -> str:
    """Numbers of tokens, and the texts around the first different id."""
    same = next((n for n, pair in enumerate(zip(ours, others, strict=False)) if pair[0] != pair[1]), 0)
    near = tokenizer.decode(ours[max(0, same - 2) : same + 4])
    return f"{len(others)} tokens for {len(ours)} of tokenizer.json in a sample, near {near!a}"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing advice: what it says of a folder's class is what is compared here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
