"""Documented edits: a run opens what `check` accepts."""

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drawloom.graph import RecipeError, UserError
from drawloom.graph.project import Recipe
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SPAN = re.compile(r"`((?:[a-z_]+(?:\.\w+)+ ?= ?[^`\n]+)+)`")
COMMENT = re.compile(r"^#.*?((?:[a-z_]+(?:\.\w+)+=\S+ ?)+)", re.MULTILINE)
TEXTS = ("corpus.use=data.text_files", 'corpus.paths=["*.txt"]', "model.hidden_size=16", "model.intermediate_size=16")
BASE = ("vars.base=base", "vars.length=192")
FINETUNED = (*BASE, 'corpus.paths=["*.txt"]')
RECIPES: dict[str, tuple[str, ...]] = {
    "first_run": TEXTS,
    "moe": TEXTS,
    "finetune": FINETUNED,
    "finetune_lora": FINETUNED,
    "distill": (*FINETUNED, "vars.teacher=base"),
    "heal": FINETUNED,
    "grpo": BASE,
    "chat": (*BASE, 'tokens.paths=["conversations.jsonl"]'),
    "dpo": (*BASE, 'tokens.paths=["preferences.jsonl"]'),
    "kto": (*BASE, 'tokens.paths=["feedback.jsonl"]'),
    "reward": (*BASE, 'tokens.paths=["preferences.jsonl"]'),
    "classify": (*BASE, 'tokens.paths=["labels.jsonl"]'),
}


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, texts and the shipped examples."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    values: dict[str, Any] = {"model": TINY, "run": {"name": "base", "folder": str(folder / "run")}}
    with Recipe.load("first_run").with_values(values | {"tokenizer": tokenizer}).open(only="export") as objects:
        objects["export"].run_after_training(1)
    shutil.copytree(folder / "run/export", folder / "base")
    shutil.copytree(ROOT / "docs/examples", folder, dirs_exist_ok=True)
    (folder / "a.txt").write_text("The pattern that the weaver drew. " * 400, "utf-8")
    rows = [{"text": f"text {number}", "label": "positive" if number % 2 else "negative"} for number in range(40)]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def list_documented_edits() -> list[list[str]]:
    """
    Return the words of every value that README, docs and the recipes' comments set in a line of text.

    A mesh is left out: it needs more processes.
    """
    spans = [span for page in PAGES for span in SPAN.findall(page.read_text("utf-8"))]
    spans += [span for path in sorted((ROOT / "recipes").rglob("*.toml")) for span in COMMENT.findall(path.read_text())]
    words = (re.sub(r" = ", "=", span) for span in dict.fromkeys(spans))
    return [shlex.split(re.sub(r'"', r'\\"', word)) for word in words if "mesh." not in word]


def open_if_accepted(recipe: str, edit: Sequence[str], folder: Path) -> bool:
    """Open the whole run unless `check` refuses the edited recipe; return whether it was opened."""
    loaded = Recipe.load(recipe, *RECIPES[recipe], f"run.folder={folder}", *edit)
    try:
        loaded.check()
    except RecipeError:
        return False
    with loaded.open():
        return True


def test_a_run_opens_what_check_accepts(reader_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes of fine-tuning open as shipped, and without adapters, as documented, unless `check` refuses that."""
    monkeypatch.chdir(reader_folder)
    refused = []
    for name in ("chat", "dpo", "kto", "reward", "classify"):
        for number, edit in enumerate(([], ["stages.adapters=[]"])):
            if not open_if_accepted(name, edit, tmp_path / f"{name}-{number}"):
                refused.append((name, *edit))
    assert refused == [("dpo", "stages.adapters=[]"), ("kto", "stages.adapters=[]")]


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ("moe", "finetune_lora", "distill", "grpo", "chat", "dpo", "reward"))
def test_a_run_opens_every_documented_edit_that_check_accepts(
    reader_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Edits of README, docs and comments of recipes are refused by `check`, or open, in every recipe."""
    monkeypatch.chdir(reader_folder)
    edits, opened, faults = list_documented_edits(), 0, []
    for number, edit in enumerate(edits):
        try:
            opened += open_if_accepted(recipe, edit, tmp_path / f"{number}")
        except UserError as error:
            faults.append(f"{edit}: {error}")
    assert not faults and len(edits) > 40 and opened > 9
