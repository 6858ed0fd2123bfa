"""Ends of texts in an export's `config.json` and `generation_config.json`, at which transformers and vLLM stop."""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from drawloom.components.storage.strict_json import parse_strict_json

log = logging.getLogger("drawloom.run")

MAX_VALUES = 2**16  # of a generation_config.json, which has tens

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def add_end_ids(config: dict[str, Any], ids: Collection[int]) -> bool:
    """
    Add ids to a text's ends, in a `config.json` or `generation_config.json`; return whether it changed.
    """
    ends = config.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not (added := [end for end in ids if end not in known]):
        return False
    config["eos_token_id"] = added[0] if ends is None and len(added) == 1 else [*known, *added]
    return True


def add_end_ids_to_generation_config(folder: Path, ids: Collection[int]) -> None:
    """
    Add ids to the ones at which transformers' `generate` stops, in an exported folder's generation_config.json.

    A folder without the file gets one, with the token ids of its config.json, unless these have all ids.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            settings = parse_strict_json(path.read_bytes(), max_values=MAX_VALUES)
        except ValueError as error:
            log.warning("%s is exported as it is, because it can't be read: %s", path.name, error)
            return
    else:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config |= config.get("text_config", {})
        settings = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    if isinstance(settings, dict) and add_end_ids(settings, ids):
        path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
