"""Reward models and classifiers, and `drawloom score`."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.feedback import encode_prompt_completion_row
from support.chat import open_tokenizer, tokenizer_folder
from support.runs import QWEN3, drawloom, series

ROOT = Path(__file__).parents[2]
RECIPE = """
extends = "reward"
device.share = true
adapters.lora = { targets = ["*_proj"], rank = 4, alpha = 8.0 }
batch = { global_size = 4, micro_size = 4 }
evaluate.every = 12
optimizer.lr = 1e-2
trainer.steps = 12
trainer.on_finish = ["@export"]
"""


def test_scores_learn_the_preference(tmp_path: Path) -> None:
    """
    The loss falls, and `drawloom score` gives chosen answers higher scores than rejected ones.

    The checkpoint has the head: a score does not depend on the answers that are computed together.
    """
    (tmp_path / "tiny.toml").write_text(RECIPE + QWEN3, "utf-8")
    (tmp_path / "again.toml").write_text(RECIPE, "utf-8")
    pairs = ROOT / "docs/examples/preferences.jsonl"
    data = (f'tokens.paths=["{pairs}"]', f"vars.base={tokenizer_folder(tmp_path / 'base')}")
    (outcome,) = drawloom(tmp_path, "run", "tiny.toml", "run.name=one", *data)
    assert outcome.code == 0, outcome.text
    (first,), *_, (last,) = series(tmp_path / "runs/one", "loss")
    assert last < 0.5 * first
    rows = [json.loads(line) for line in pairs.read_text("utf-8").splitlines()]
    answers = [
        {"prompt": row["prompt"], "completion": row[side]}
        for row in rows
        if "prompt" in row
        for side in ("chosen", "rejected")
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)), "utf-8")
    scores = {}
    for count in ("1", "5"):
        words = ("score", "runs/one", "answers.jsonl", "--to", f"scores{count}.jsonl", "--rows", count)
        (outcome,) = drawloom(tmp_path, *words)
        assert outcome.code == 0 and f"{len(answers)} scores" in outcome.text, outcome.text
        written = (tmp_path / f"scores{count}.jsonl").read_text("utf-8").splitlines()
        scores[count] = [json.loads(line)["score"] for line in written]
    assert scores["1"] == pytest.approx(scores["5"], rel=1e-4, abs=1e-5)
    is_right = [chosen > rejected for chosen, rejected in zip(scores["1"][::2], scores["1"][1::2], strict=True)]
    assert sum(is_right) > 0.7 * len(is_right)
    export = tmp_path / "runs/one/export"
    model, tokenizer = transformers.AutoModelForSequenceClassification.from_pretrained(export), open_tokenizer(export)
    with closing(ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens_by_name)) as template:
        encoded = [encode_prompt_completion_row(tokenizer, answer, template).ids.tolist() for answer in answers[:4]]
    for ids, score in zip(encoded, scores["1"], strict=False):
        assert model(torch.tensor([ids])).logits.tolist() == [[pytest.approx(score, rel=1e-4, abs=1e-5)]]
    assert model.config.id2label == {0: "reward"}
    again = ("run.name=again", "optimizer.lr=1e-30", "trainer.steps=1", "stages.adapters=[]")
    based = ("vars.base=runs/one/export", "loss.head=runs/one/export")
    (outcome,) = drawloom(tmp_path, "run", "again.toml", *again, data[0], *based)
    assert outcome.code == 0, outcome.text
    (outcome,) = drawloom(tmp_path, "score", "runs/again", "answers.jsonl", "--to", "again.jsonl")
    written = (tmp_path / "again.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["score"] for line in written] == pytest.approx(scores["1"], rel=1e-4, abs=1e-5)
    (refused,) = drawloom(tmp_path, "score", "runs/one", "answers.jsonl", "--to", "scores1.jsonl")
    assert refused.code == 2 and "scores1.jsonl exists" in refused.text


def test_a_classifier_learns_its_labels_and_is_read_by_transformers(tmp_path: Path) -> None:
    """The loss falls; the logits of an export by two stages, and `score`, find the labels."""
    (tmp_path / "tiny.toml").write_text(RECIPE.replace('"reward"', '"classify"') + QWEN3, "utf-8")
    base = tokenizer_folder(tmp_path / "base")
    lines = [{"text": f"{'good' if n % 2 else 'day'} {n}", "label": ("negative", "positive")[n % 2]} for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    data = (f"vars.base={base}", 'tokens.paths=["mine.jsonl"]', "vars.length=32", "run.name=stages")
    outcomes = drawloom(tmp_path, "run", "tiny.toml", *data, "mesh.pipeline=2", "batch.micro_size=2", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].text
    [*_, (loss, accuracy)] = series(tmp_path / "runs/stages", "loss", "accuracy")
    assert loss < 0.1 and accuracy == 1
    unlabelled = [{"text": line["text"]} for line in lines[:6]]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, unlabelled)), "utf-8")
    (outcome,) = drawloom(tmp_path, "score", "runs/stages", "texts.jsonl", "--to", "labels.jsonl", "--rows", "4")
    assert outcome.code == 0, outcome.text
    scored = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text("utf-8").splitlines()]
    (outcome,) = drawloom(tmp_path, "evaluate", "runs/stages")
    assert " texts" in outcome.text, outcome.text
    export = tmp_path / "runs/stages/export"
    model, tokenizer = transformers.AutoModelForSequenceClassification.from_pretrained(export), open_tokenizer(export)
    assert model.config.label2id == {"negative": 0, "positive": 1}
    for line, row in zip(lines[:6], scored, strict=True):
        logits = model(torch.tensor([[*tokenizer.encode(line["text"]).tolist(), tokenizer.eos_id]])).logits
        assert model.config.id2label[int(logits.argmax())] == line["label"] == row["label"]
        expected = logits[0].softmax(0).tolist()
        assert [*row["probabilities"].values()] == pytest.approx(expected, rel=1e-4, abs=1e-5)
