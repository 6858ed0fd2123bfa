"""Other text in place of a run's data; `tests/runs/test_evaluate.py` measures runs."""

from typing import Any

import pytest

from drawloom.components.commands.evaluate import _with_corpus
from drawloom.graph.project import Recipe

STORE = {"use": "data.tokenized", "path": "store"}
TEXTS = {"use": "data.tokenized_text", "corpus": {"use": "data.jsonl", "paths": ["own.jsonl"]}}
DATA: dict[str, dict[str, Any]] = {
    "a mixture": {"tokens": {"use": "data.mixture", "sources": {"one": STORE, "other": TEXTS}}},
    "examples": {
        "examples": {"use": "data.json_examples", "paths": ["own.jsonl"]},
        "collator": {"use": "data.pad_collator"},
        "packing": {"use": "data.collated", "max_length": 24},
    },
}


@pytest.mark.parametrize("what", DATA)
def test_other_text_replaces_all_data(what: str) -> None:
    """Nothing of the run's own data is needed to make the rows, and the recipe has no problem."""
    recipe = _with_corpus(Recipe.load("first_run").with_values(DATA[what]), ["other.jsonl"])
    recipe.check()
    needed = {node.spec.use: node.settings for node in recipe.graph.restricted_to(["packing"]).nodes.values()}
    assert {"data.packing.concatenated", "data.tokenized_text", "data.jsonl"} < needed.keys()
    assert not needed.keys() & {"data.tokenized", "data.mixture", "data.json_examples", "data.collated"}
    assert needed["data.jsonl"]["paths"] == ["other.jsonl"]
