"""End tokens in exported generation settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.export.hf_writer import add_generation_end_ids


@pytest.mark.parametrize(
    ("config", "settings", "wanted"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 9, "top_k": 5}, {"eos_token_id": [9, 1, 7], "top_k": 5}),
        ({}, {"eos_token_id": [7, 9]}, {"eos_token_id": [7, 9, 1]}),
        ({}, {"eos_token_id": [7, 1]}, {"eos_token_id": [7, 1]}),
        ({"eos_token_id": 3, "pad_token_id": 2, "vocab_size": 9}, None, {"eos_token_id": [3, 1, 7], "pad_token_id": 2}),
        ({"text_config": {"eos_token_id": [3]}}, None, {"eos_token_id": [3, 1, 7]}),
        ({"eos_token_id": [1, 7]}, None, None),
    ],
)
def test_end_ids_are_added_after_the_ones_of_the_folder(
    tmp_path: Path, config: dict[str, Any], settings: Any, wanted: Any
) -> None:
    """Other settings stay; a missing file has the token ids of config.json; without new ids nothing is written."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "generation_config.json"
    if settings is not None:
        path.write_text(json.dumps(settings))
    add_generation_end_ids(tmp_path, [1, 7])
    assert (json.loads(path.read_text()) if path.is_file() else None) == wanted
