"""End tokens in a folder's `generation_config.json`, where transformers and vLLM stop."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

NAME = "generation_config.json"

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def add_end_ids_to_generation_config(folder: Path, end_ids: Collection[int]) -> None:
    """
    Add ids to `eos_token_id` of an exported folder's generation_config.json, after its own ids.

    A folder without the file gets one, with the token ids of its config.json. Nothing changes without new ids.
    """
    path, config = folder / NAME, json.loads((folder / "config.json").read_text("utf-8"))
    config = {**config, **config.get("text_config", {})}
    settings: dict[str, Any] = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    if path.is_file():
        settings = json.loads(path.read_text("utf-8"))
    known = settings.get("eos_token_id")
    ids = known if isinstance(known, list) else [] if known is None else [known]
    if new := sorted({*end_ids} - {*ids}):
        path.write_text(json.dumps({**settings, "eos_token_id": [*ids, *new]}, indent=2) + "\n", "utf-8")
