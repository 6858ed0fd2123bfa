"""Names and shapes of transformers' modules, for every family."""

import json
from pathlib import Path

import pytest
import transformers

from drawloom import Recipe
from drawloom.components.model.fallback.build import build_meta_model
from drawloom.components.weights.load import convert_tensors, persistent_tensors
from support.family_words import FAMILY_SIZES, FAMILY_WORDS


@pytest.mark.parametrize("family", FAMILY_WORDS)
def test_parameters_map_to_all_modules_of_transformers(family: str, tmp_path: Path) -> None:
    """Names and shapes equal transformers' for our config."""
    run = {"run": {"name": "base", "folder": str(tmp_path / "run")}}
    with Recipe.load("first_run", *FAMILY_SIZES, *FAMILY_WORDS[family]).with_values(run).open(only="model") as objects:
        model = objects["model"]
        (tmp_path / "config.json").write_text(json.dumps(model.hugging_face_config()), "utf-8")
        ours = convert_tensors(model.transformers_mapper(None), persistent_tensors(model.build_on_meta()))
    theirs = build_meta_model(transformers.AutoConfig.from_pretrained(tmp_path)).state_dict()
    if model.architecture.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
