"""Recipes that start from a model."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project, Recipe
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY
from support.runs import drawloom, rows, series

PROJECT = Project.from_package("drawloom")
ROOT = Path(__file__).parents[2]
TEXT = f'corpus.paths=["{ROOT}/components/data/**/*.py"]'
CONVERSATIONS, PAIRS = (
    f'tokens.paths=["{ROOT}/docs/examples/{name}.jsonl"]' for name in ("conversations", "preferences")
)
SMALL = (
    *("trainer.steps=3", "vars.length=32", "batch.global_size=2", "batch.micro_size=2", "validation.rows_used=2"),
    "sample.tokens=4",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Export a tiny model with a tokenizer, and return its Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    run: dict[str, Any] = {"name": "base", "folder": str(folder / "run")}
    with Recipe.load("first_run").with_values({"model": TINY, "run": run}).open(only="export") as objects:
        objects["export"].run_after_training(1)
    yield folder / "run/export"


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a tiny model whose tokenizer has a chat template, and return its folder."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    model = TINY | {"num_key_value_heads": 2}  # for two tensor ranks
    values: dict[str, Any] = {"model": model, "run": {"name": "base", "folder": str(folder / "run")}}
    with Recipe.load("first_run").with_values(values | {"tokenizer": tokenizer}).open(only="export") as objects:
        objects["export"].run_after_training(1)
    return folder / "run/export"


def test_chat_trains_on_answers_and_exports_an_adapter(chat_base: Path, tmp_path: Path) -> None:
    """The recipe trains on the shipped conversations, and its export has an adapter and the chat template."""
    data = Path(__file__).parents[2] / "docs/examples/conversations.jsonl"
    words = (f"vars.base={chat_base}", *SMALL, f'tokens.paths=["{data}"]', "vars.length=128")
    [outcome] = drawloom(tmp_path, "run", "chat", *words)
    assert outcome.code == 0, outcome.text
    run = tmp_path / "runs/chat"
    assert "are trained" in (run / "log/rank-0.log").read_text("utf-8") and len(rows(run)) == 3
    assert (run / "export/chat_template.jinja").exists() and (run / "adapter/adapter_config.json").exists()


def test_chat_keeps_conversations_whole(chat_base: Path) -> None:
    """Every conversation is in one row: an answer without its question would teach nothing useful."""
    data = Path(__file__).parents[2] / "docs/examples/conversations.jsonl"
    words = (f"vars.base={chat_base}", f'tokens.paths=["{data}"]', "vars.length=300")
    with Recipe.load("chat", *words).open(only="packing") as run:
        rows, lengths = run["packing"], run["tokens"].documents("train").lengths
        assert rows.count_rows("train") < len(lengths) and lengths.max() <= 300
        assert sorted(
            name for row in range(rows.count_rows("train")) for name in rows.describe_row_origins("train", row)
        ) == sorted(run["tokens"].documents("train").describe_origin(number) for number in range(len(lengths)))


SCHEDULE = "pipeline.schedules.zero_bubble_1p"
DATA = Path(__file__).parents[2] / "docs/examples/preferences.jsonl"


def test_dpo_prefers_the_chosen_answers(chat_base: Path, tmp_path: Path) -> None:
    """
    The loss on the shipped pairs starts at log(2), where model and reference are equal, and margins end above 0.

    Two pipeline ranks times two tensor ranks have one process's numbers. The reward accuracy, which counts a tie as a
    half, is equal at every step, although tensor ranks round differently.
    """
    words = (
        f"vars.base={chat_base}",
        f'tokens.paths=["{DATA}"]',
        "optimizer.lr=0.01",
        "trainer.steps=5",
        "sample.tokens=4",
    )
    names = ("loss", "grad_norm", "reward_margin", "reward_accuracy")
    steps = {}
    for name, ranks, more in (
        ("one", 1, ["batch.micro_size=4"]),
        ("four", 4, ["batch.micro_size=1", "mesh.pipeline=2", "mesh.tensor=2", f"schedule.use={SCHEDULE}"]),
    ):
        outcomes = drawloom(tmp_path, "run", "dpo", *words, *more, f"run.name={name}", ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        steps[name] = series(tmp_path / "runs" / name, *names)
    first, last = steps["one"][0], steps["one"][-1]
    assert first[0] == pytest.approx(math.log(2), rel=1e-12) and first[2:] == (0.0, 0.5)
    assert last[0] < 0.6 and last[2] > 0.2 and last[3] == 1.0
    for ours, theirs in zip(steps["one"], steps["four"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6) and ours[3] == theirs[3]
    text = drawloom(tmp_path, "evaluate", "runs/one")[0].text
    assert re.search(r"step 5: loss 0\.\d+ over 4 pairs$", text.strip()), text
    (tmp_path / "own.txt").write_text("hello there", "utf-8")
    text = drawloom(tmp_path, "evaluate", "runs/one", "--corpus", "own.txt")[0].text
    assert re.search(r"loss \d+\.\d+ over \d+ tokens, perplexity .* bits per byte$", text.strip(), re.MULTILINE), text


@pytest.mark.soak
def test_dpo_of_all_weights_uses_a_stored_reference(chat_base: Path, tmp_path: Path) -> None:
    """
    `reference-logps` adds the base's log-probabilities of both answers, so that full tuning starts at log(2). A frozen
    model with the base's weights has the same losses.
    """
    full = ("stages.adapters=[]", "trainer.on_finish=[]", "optimizer.lr=1e-3", "trainer.steps=3")
    words = (f"vars.base={chat_base}", *full, "loss.reference=data", "tokens.validation_fraction=0.0")
    [outcome] = drawloom(tmp_path, "run", "dpo", *words, f'tokens.paths=["{DATA}"]')
    assert outcome.code == 1 and "drawloom reference-logps" in outcome.text, outcome.text
    command = ("reference-logps", "dpo", *words, f'tokens.paths=["{DATA}"]', "--to", "pairs.jsonl")
    [outcome] = drawloom(tmp_path, *command, "--pairs", "5")
    assert outcome.code == 0 and "wrote pairs.jsonl, 14 lines" in outcome.text, outcome.text
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()]
    without = [{key: value for key, value in line.items() if not key.startswith("ref_")} for line in lines]
    assert without == [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
    [outcome] = drawloom(tmp_path, "run", "dpo", *words, "run.name=full", 'tokens.paths=["pairs.jsonl"]')
    assert outcome.code == 0, outcome.text
    [first, *_, last] = series(tmp_path / "runs/full", "loss", "reward_margin", "reward_accuracy")
    assert first == pytest.approx((math.log(2), 0.0, 0.5), abs=1e-5) and last[0] < first[0]
    frozen = ("reference.use=stages.frozen", 'reference.model={use="model.auto", path="$vars.base"}')
    more = ("loss.reference=model", *frozen, "run.name=frozen", f'tokens.paths=["{DATA}"]')
    [outcome] = drawloom(tmp_path, "run", "dpo", *words, *more)
    assert outcome.code == 0, outcome.text
    for names in ("full", "frozen"), ("frozen", "full"):
        ours, theirs = (series(tmp_path / "runs" / name, "loss", "reward_margin", "grad_norm") for name in names)
        assert ours == [pytest.approx(values, rel=1e-5, abs=1e-6) for values in theirs]


def test_dpo_needs_adapters_that_can_be_disabled(chat_base: Path, tmp_path: Path) -> None:
    """Without adapters, or with adapters that train the model's own weights, `check` reports the missing reference."""

    def problems(*words: str) -> list[str]:
        words = (f"vars.base={chat_base}", PAIRS, *words)
        return [str(problem) for problem in PROJECT.graph(PROJECT.load("dpo", (), words)).problems]

    assert problems() == []
    [problem] = problems("stages.adapters=[]", "trainer.on_finish=[]")
    assert "[loss] compares the model with itself without adapters, and [stages] has no adapters" in problem
    [problem] = problems("adapters.norms.use=adapters.full_tuning", 'adapters.norms.targets=["norm"]')
    assert "compares the model with itself without adapters, which [adapters.norms] changes; leave it out" in problem
    assert any("documents are compared as wholes" in text for text in problems("mesh.context=2"))


@pytest.mark.parametrize(
    ("recipe", "data"), [("finetune", TEXT), ("finetune_lora", TEXT), ("chat", CONVERSATIONS), ("dpo", PAIRS)]
)
def test_recipes_need_a_base_and_data_and_nothing_else(recipe: str, data: str, chat_base: Path) -> None:
    """With base and data there is no problem; the message about a missing one has the setting to write."""

    def problems(*words: str) -> list[str]:
        try:
            return [str(problem) for problem in Recipe.load(recipe, *words).check()]
        except RecipeError as error:
            return [str(problem) for problem in error.problems]

    assert problems(f"vars.base={chat_base}", data) == []
    assert problems(data) and all(
        "write base = ... in [vars], or add vars.base=... to the command" in problem for problem in problems(data)
    )
    assert any("config.json" in problem for problem in problems(f"vars.base={chat_base.parent}", data))
    [problem] = problems(f"vars.base={chat_base}")
    node = data.partition(".")[0]
    assert f"""write paths = ["..."] in [{node}], or add '{node}.paths=["..."]' to the command""" in problem
    lines = next((Path(__file__).parents[2] / "recipes").rglob(f"{recipe}.toml")).read_text("utf-8").splitlines()
    assert len(lines) < 40


def test_finetune_starts_from_the_base(base: Path, tmp_path: Path) -> None:
    """With a learning rate of nearly 0 the export equals the base."""
    words = (f"vars.base={base}", TEXT, *SMALL, "optimizer.lr=1e-30", "optimizer.weight_decay=0.0")
    [outcome] = drawloom(tmp_path, "run", "finetune", *words)
    assert outcome.code == 0, outcome.text
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "runs/finetune/export", base))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    [outcome] = drawloom(tmp_path, "generate", "runs/finetune", "--prompt", "def", "--tokens", "3")
    assert outcome.code == 0 and outcome.text.startswith("def"), outcome.text


def test_added_tokens_get_embedding_rows(chat_base: Path, tmp_path: Path) -> None:
    """Rows for two added tokens are trained alone, exported in one table, and used in samples."""
    shutil.copytree(chat_base, tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    words = (f"vars.base={chat_base}", TEXT, f"tokenizer.path={tmp_path / 'tokenizer'}", *SMALL)
    [outcome] = drawloom(tmp_path, "run", "finetune", *words)
    assert (
        outcome.code == 2
        and "the tokenizer has 308 ids" in outcome.text
        and "write new_tokens = 2 for some that were added" in outcome.text
    ), outcome.text
    alone = ('stages.adapters=["@new"]', "new.use=adapters.full_tuning", 'new.targets=["new_tokens"]')
    [outcome] = drawloom(tmp_path, "run", "finetune", *words, "model.new_tokens=2", *alone)
    assert outcome.code == 0, outcome.text
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "runs/finetune/export", chat_base))
    name = "model.embed_tokens.weight"
    assert len(ours[name]) == len(theirs[name]) + 2 and torch.equal(ours[name][:-2], theirs[name])
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs if key not in (name, "lm_head.weight"))
    [outcome] = drawloom(tmp_path, "generate", "runs/finetune", "--prompt", "def", "--tokens", "3")
    assert outcome.code == 0 and outcome.text.startswith("def"), outcome.text


def test_finetune_lora_exports_an_adapter(base: Path, tmp_path: Path) -> None:
    """The run exports an adapter that names its base, and `generate` uses the run folder and the base."""
    words = (f"vars.base={base}", TEXT, *SMALL)
    [outcome] = drawloom(tmp_path, "run", "finetune_lora", *words)
    assert outcome.code == 0, outcome.text
    run = tmp_path / "runs/finetune_lora"
    assert len(rows(run)) == 3
    config = json.loads((run / "adapter/adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 16
    assert (run / "export/config.json").exists() and (run / "sample.txt").exists()
    [outcome] = drawloom(tmp_path, "generate", "runs/finetune_lora", "--prompt", "def", "--tokens", "3")
    assert outcome.code == 0 and outcome.text.startswith("def"), outcome.text
