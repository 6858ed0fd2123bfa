"""The configuration of a model folder with which transformers reads its `tokenizer.json` unchanged."""

import json
from pathlib import Path
from typing import Any

CONFIG, MODEL = "tokenizer_config.json", "config.json"

CLASSES_OF_FILES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Class names, in transformers 4 and 5, that read `tokenizer.json` unchanged."""

REBUILT = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""The `model_type` values of our families for which transformers 5 ignores the declared tokenizer class
(MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in its tokenization_auto.py): Qwen's classes replace normalizer and
pre-tokenizer. A folder with an `auto_map` keeps its class; transformers runs its code only on request."""

AUTO_MAP = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
CODE_FILE = "own_tokenizer.py"
CODE = '''"""The tokenizer of `tokenizer.json`, unchanged: transformers 5 would rebuild it as Qwen's."""

from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
'''


def does_transformers_use_tokenizer_json(folder: Path) -> bool:
    """
    Return whether transformers reads the `tokenizer.json` unchanged, according to the configurations in the folder.
    """
    config = read_json_object_or_empty(folder / CONFIG)
    names_code = config.get("auto_map") == AUTO_MAP and (folder / CODE_FILE).is_file()
    return config.get("tokenizer_class") in CLASSES_OF_FILES and (
        names_code or not _transformers_ignores_declared_class(folder)
    )


def edit_config_to_use_tokenizer_json(folder: Path) -> None:
    """Edit `tokenizer_config.json` to make transformers read `tokenizer.json` unchanged."""
    if does_transformers_use_tokenizer_json(folder):
        return
    config = read_json_object_or_empty(folder / CONFIG) | {"tokenizer_class": CLASSES_OF_FILES[0]}
    if _transformers_ignores_declared_class(folder):
        (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
        config["auto_map"] = AUTO_MAP
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _transformers_ignores_declared_class(folder: Path) -> bool:
    """Return whether transformers ignores the declared tokenizer class for a folder's model family."""
    return read_json_object_or_empty(folder / MODEL).get("model_type") in REBUILT


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in a folder's `tokenizer_config.json` by name, such as eos_token."""
    config = read_json_object_or_empty(folder / CONFIG)
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in config.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def read_json_object_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file is missing or invalid."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
