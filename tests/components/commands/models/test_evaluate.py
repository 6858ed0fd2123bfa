"""Other text in place of a run's data; `tests/runs/test_evaluate.py` measures runs."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.commands.models.evaluate import _make_corpus_node, _replace_data_by_corpus
from drawloom.graph import UserError
from drawloom.graph.project import Recipe

STORE = {"use": "data.tokenized", "path": "store"}
TEXTS = {"use": "data.tokenized_text", "corpus": {"use": "data.jsonl", "paths": ["own.jsonl"]}}
OTHER = {"use": "data.jsonl", "paths": ["other.jsonl"], "validation_fraction": 0.0}
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
    recipe = _replace_data_by_corpus(Recipe.load("first_run").with_values(DATA[what]), OTHER)
    recipe.check(skip_machine_checks=True)
    needed = {node.spec.use: node.settings for node in recipe.graph.restrict_to(["packing"]).nodes.values()}
    assert {"data.packing.windows", "data.tokenized_text", "data.jsonl"} < needed.keys()
    assert not needed.keys() & {"data.tokenized", "data.mixture", "data.json_examples", "data.collated"}
    assert needed["data.jsonl"]["paths"] == ["other.jsonl"]


def test_files_are_read_by_their_format(tmp_path: Path) -> None:
    """Files are read as by `tokenize`, also compressed, and JSON never as text; several formats at once are refused."""
    for name in ("a.txt", "b.jsonl", "c.jsonl.zst", "d.parquet", "e.arrow"):
        (tmp_path / name).touch()
    for names, use in (("a.txt", "text_files"), ("[bc].*", "jsonl"), ("[de].*", "parquet")):
        assert _make_corpus_node([str(tmp_path / names)])["use"] == f"data.{use}"
    with pytest.raises(UserError, match=r"^--corpus: .*a\.txt and .*c\.jsonl\.zst differ in format; measure one"):
        _make_corpus_node([str(tmp_path / "a.txt"), str(tmp_path / "c*")])
    with pytest.raises(UserError, match=r'^--corpus: no file matches ".*none"'):
        _make_corpus_node([str(tmp_path / "none")])
