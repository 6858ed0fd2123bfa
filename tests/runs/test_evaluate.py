"""Evaluation, export, embeddings and samples of a chosen checkpoint of a run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.runs import drawloom, rows, write_corpus

ANSWERS = """
extends = "tiny.toml"
unset = ["corpus", "tokens", "packing", "sample"]
run.name = "answers"
examples = { use = "data.json_examples", paths = ["answers.jsonl"], validation_fraction = 0.5 }
collator = { use = "data.pad_collator" }
rows = { use = "data.collated", max_length = 16 }
trainer = { steps = 2, on_finish = [] }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run that evaluated all validation rows at every checkpoint."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_corpus(folder)
    words = ("validation.rows_used=1000", "evaluate.every=4", "checkpoint.keep=3")
    assert drawloom(folder, "run", "tiny.toml", *words)[0].code == 0
    return folder


def test_evaluate_prints_the_validation_loss_of_the_run(folder: Path) -> None:
    """`evaluate --step` prints each checkpoint's validation loss, and `--best` picks the lowest."""
    losses = {row["step"]: row["validation_loss"] for row in rows(folder / "runs/tiny") if "validation_loss" in row}
    for step, loss in losses.items():
        (outcome,) = drawloom(folder, "evaluate", "runs/tiny", "--step", str(step))
        assert outcome.text.startswith(f"runs/tiny, step {step}: loss {loss:.4f} over ")
    best = min(losses, key=lambda step: losses[step])
    assert f"step {best}:" in drawloom(folder, "evaluate", "runs/tiny", "--best")[0].text


def test_the_curve_of_the_validation_loss_begins_with_the_initial_weights(folder: Path) -> None:
    """Weights that no step changes keep the loss of step 0, and a resumed run does not measure step 0 again."""
    words = (
        "run",
        "tiny.toml",
        "run.name=start",
        "evaluate.at_start=true",
        "optimizer.lr=1e-30",
        "trainer.on_finish=[]",
        "trackers.csv.use=trackers.csv",
    )
    for steps in (2, 3):
        outcome = drawloom(folder, *words, f"trainer.steps={steps}", "--accept-changes")[0]
        assert outcome.code == 0, outcome
    lines = (folder / "runs/start/metrics.jsonl").read_text("utf-8").splitlines()
    measured = [(row["step"], row["validation_loss"]) for row in map(json.loads, lines) if "validation_loss" in row]
    loss = measured[0][1]
    assert measured == [(0, loss), (2, loss), (3, loss)]
    table = (folder / "runs/start/metrics.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in table] == ["step", "0", "1", "2", "3"]


def test_other_text_is_measured_whole(folder: Path) -> None:
    """Every byte of a text or JSON lines file counts once, and bits are the loss in nats divided by ln 2."""
    text = (folder / "corpus/part1.py").read_text()
    (folder / "same.jsonl").write_text(json.dumps({"text": text}) + "\n")
    names = ("corpus/part1.py", "same.jsonl")
    printed, same = (drawloom(folder, "evaluate", "runs/tiny", "--corpus", name)[0].text for name in names)
    assert printed == same
    numbers = re.findall(r"loss ([\d.]+) over ([\d.]+) tokens.* ([\d.]+) bits", printed)[0]
    loss, tokens, bits = map(float, numbers)
    assert tokens == len(text.encode())  # all but the first byte, and the end of the document
    assert bits == pytest.approx(loss * tokens / (tokens - 1) / math.log(2), rel=1e-4)


def test_documents_have_the_losses_that_transformers_gives_them_alone(folder: Path) -> None:
    """Whole documents, and longer ones in sliding windows of any stride, have the losses of transformers."""
    from transformers import AutoModelForCausalLM  # takes seconds

    texts = ["def f(x):", "y", "return " * 3, "".join(f"x{number} = {number}\n" for number in range(20))]
    (folder / "mixed.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    theirs = AutoModelForCausalLM.from_pretrained(folder / "runs/tiny/export").eval()
    for words, stride in ((("--stride", "5"), 5), ((), 16), (("--stride", "32"), 32)):
        losses = [loss for text in texts for loss in _sliding_losses(theirs, [*text.encode(), 256], 32, stride)]
        outcome = drawloom(folder, "evaluate", "runs/tiny", "--corpus", "mixed.jsonl", *words)[0]
        mean = math.fsum(losses) / len(losses)
        assert f"loss {mean:.4f} over {len(losses)} tokens" in outcome.text, (mean, len(losses), outcome)
        summary = f"4 documents, each on its own; 1 longer than a row of 32 tokens, in windows that move by {stride}"
        assert summary in outcome.text
    assert "--stride needs --corpus" in drawloom(folder, "evaluate", "runs/tiny", "--stride", "5")[0].text


def _sliding_losses(model: Any, ids: list[int], length: int, stride: int) -> list[float]:
    """Return the loss of every token but the first, in windows of `length` tokens."""
    losses_of_tokens: list[float] = []
    for start in range(0, len(ids) - 1, stride):
        window = torch.tensor(ids[start : start + length + 1])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none")
        losses_of_tokens += losses[len(losses_of_tokens) - start :].tolist()
        if len(losses_of_tokens) == len(ids) - 1:
            break
    return losses_of_tokens


def test_bytes_that_are_not_trained_do_not_count(folder: Path) -> None:
    """If prompts have weight 0, bits per byte count the bytes of answers only."""
    weights = [0.0] * 12 + [0.5] * 4
    examples = [{"input_ids": [*f"what is {n:2d}?".encode(), *b" four"], "weights": weights} for n in range(20)]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    (folder / "answers.toml").write_text(ANSWERS)
    assert drawloom(folder, "run", "answers.toml")[0].code == 0
    printed = drawloom(folder, "evaluate", "runs/answers")[0].text
    loss, weight, bits = map(float, re.findall(r"loss ([\d.]+) over ([\d.]+) tokens.* ([\d.]+) bits", printed)[0])
    assert weight % 2 == 0 and bits == pytest.approx(loss / math.log(2), rel=1e-4)


def test_a_run_of_a_store_is_measured_on_other_text(folder: Path) -> None:
    """A run trained on a token store evaluates any UTF-8 text file and refuses empty files."""
    assert drawloom(folder, "tokenize", "corpus/*.py", "--to", "store")[0].code == 0
    words = ("tokens.use=data.tokenized", "tokens.path=store", "run.name=stored", "trainer.steps=4")
    assert drawloom(folder, "run", "tiny.toml", *words)[0].code == 0
    printed = drawloom(folder, "evaluate", "runs/stored", "--corpus", "corpus/part1.py")[0].text
    assert f"over {len((folder / 'corpus/part1.py').read_bytes())} tokens" in printed
    (folder / "empty.txt").touch()
    refused = drawloom(folder, "evaluate", "runs/stored", "--corpus", "empty.txt")[0]
    assert refused.code == 2 and "--corpus: there is nothing to predict in empty.txt" in refused.text
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    refused = drawloom(folder, "evaluate", "runs/stored", "--corpus", "latin.txt")[0]
    assert refused.text.startswith("--corpus: ") and "latin.txt: byte 3 (0xe9) is not UTF-8" in refused.text


def test_embeddings_are_the_means_of_hidden_states(folder: Path) -> None:
    """Mean, first and last hidden states of documents equal transformers' on the export."""
    from transformers import AutoModelForCausalLM  # takes seconds

    (folder / "some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("def f(x):", "x", "y" * 99)))
    words = ("some.jsonl", "--layers", "0", "1", "--context", "20", "--rows", "2")
    for pool in ("mean", "first", "last"):
        outcome = drawloom(folder, "embed", "runs/tiny", *words, "--pool", pool, "--to", f"{pool}.safetensors")[0]
        assert outcome.code == 0 and f"wrote {pool}.safetensors, 3 x 2 x 16 numbers" in outcome.text, outcome.text
    means, first, last = (
        load_file(folder / f"{name}.safetensors")["hidden_states"] for name in ("mean", "first", "last")
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder / "runs/tiny/export")
    for row, text in enumerate((b"def f(x):", b"x", b"y" * 20)):
        states = theirs(torch.tensor([[*text]]), output_hidden_states=True).hidden_states
        for layer, expected in enumerate(states):
            torch.testing.assert_close(means[row, layer], expected[0].mean(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(first[row, layer], expected[0, 0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(last[row, layer], expected[0, -1], rtol=1e-4, atol=1e-5)
    (folder / "empty.jsonl").write_text('{"text": ""}\n')
    empty = drawloom(folder, "embed", "runs/tiny", "empty.jsonl", "--to", "empty.safetensors")[0]
    assert "documents without a token: 1; their hidden states are 0" in empty.text
    refused = drawloom(folder, "embed", "runs/tiny", "some.jsonl", "--to", "new.safetensors", "--layers", "2")[0]
    assert refused.code == 2 and "--layers: there is no layer 2; the model has 0 to 1" in refused.text


def test_an_earlier_checkpoint_is_exported_and_sampled(folder: Path) -> None:
    """The export records its step, and a step without a checkpoint is refused."""
    assert drawloom(folder, "export", "runs/tiny", "--step", "8", "--to", "eight")[0].code == 0
    assert json.loads((folder / "eight/trainer_state.json").read_text())["global_step"] == 8
    assert drawloom(folder, "generate", "runs/tiny", "--best", "--prompt", "def", "--tokens", "3")[0].code == 0
    refused = drawloom(folder, "generate", "runs/tiny", "--step", "5", "--prompt", "x")[0]
    assert refused.code == 2 and refused.text.startswith("--step 5: runs/tiny has checkpoints of steps 4, 8, 10")
