"""Measuring, exporting and sampling a chosen checkpoint of a run."""

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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, all of whose validation rows were evaluated at every checkpoint."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_corpus(folder)
    words = ("validation.rows_used=1000", "evaluate.every=4", "checkpoint.keep=3")
    assert drawloom(folder, "run", "tiny.toml", *words)[0].code == 0
    return folder


def test_the_validation_loss_is_that_of_the_run(place: Path) -> None:
    """For each of its checkpoints; the best one is that whose loss is least."""
    losses = {row["step"]: row["validation_loss"] for row in rows(place / "runs/tiny") if "validation_loss" in row}
    for step, loss in losses.items():
        (found,) = drawloom(place, "evaluate", "runs/tiny", "--step", str(step))
        assert found.text.startswith(f"runs/tiny, step {step}: loss {loss:.4f} over ")
    best = min(losses, key=lambda step: losses[step])
    assert f"step {best}:" in drawloom(place, "evaluate", "runs/tiny", "--best")[0].text


def test_the_curve_of_the_validation_loss_begins_with_the_initial_weights(place: Path) -> None:
    """Weights that no step changes keep their loss of step 0, and a run that resumes does not measure it again."""
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
        outcome = drawloom(place, *words, f"trainer.steps={steps}", "--accept-changes")[0]
        assert outcome.code == 0, outcome
    lines = (place / "runs/start/metrics.jsonl").read_text("utf-8").splitlines()
    measured = [(row["step"], row["validation_loss"]) for row in map(json.loads, lines) if "validation_loss" in row]
    loss = measured[0][1]
    assert measured == [(0, loss), (2, loss), (3, loss)]
    table = (place / "runs/start/metrics.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in table] == ["step", "0", "1", "2", "3"]


def test_other_text_is_measured_whole(place: Path) -> None:
    """Every byte of a file counts once, also of JSON lines, and its loss in bits is that in nats."""
    text = (place / "corpus/part1.py").read_text()
    (place / "same.jsonl").write_text(json.dumps({"text": text}) + "\n")
    names = ("corpus/part1.py", "same.jsonl")
    printed, same = (drawloom(place, "evaluate", "runs/tiny", "--corpus", name)[0].text for name in names)
    assert printed == same
    numbers = re.findall(r"loss ([\d.]+) over ([\d.]+) tokens.* ([\d.]+) bits", printed)[0]
    loss, tokens, bits = map(float, numbers)
    assert tokens == len(text.encode())  # all but the first byte, and the end of the document
    assert bits == pytest.approx(loss * tokens / (tokens - 1) / math.log(2), rel=1e-4)


def test_documents_have_the_losses_that_transformers_gives_them_alone(place: Path) -> None:
    """Whole ones, and those longer than a row by its sliding window, for any stride; what is printed counts them."""
    from transformers import AutoModelForCausalLM  # takes seconds

    texts = ["def f(x):", "y", "return " * 3, "".join(f"x{number} = {number}\n" for number in range(20))]
    (place / "mixed.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    theirs = AutoModelForCausalLM.from_pretrained(place / "runs/tiny/export").eval()
    for words, stride in ((("--stride", "5"), 5), ((), 16), (("--stride", "32"), 32)):
        losses = [loss for text in texts for loss in _sliding_losses(theirs, [*text.encode(), 256], 32, stride)]
        outcome = drawloom(place, "evaluate", "runs/tiny", "--corpus", "mixed.jsonl", *words)[0]
        mean = math.fsum(losses) / len(losses)
        assert f"loss {mean:.4f} over {len(losses)} tokens" in outcome.text, (mean, len(losses), outcome)
        what = f"4 documents, each on its own; 1 longer than a row of 32 tokens, in windows that move by {stride}"
        assert what in outcome.text
    assert "is of windows over the documents" in drawloom(place, "evaluate", "runs/tiny", "--stride", "5")[0].text


def _sliding_losses(model: Any, ids: list[int], length: int, stride: int) -> list[float]:
    """The loss of each token but the first, by windows that see `length` tokens."""
    found: list[float] = []
    for start in range(0, len(ids) - 1, stride):
        window = torch.tensor(ids[start : start + length + 1])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none")
        found += losses[len(found) - start :].tolist()
        if len(found) == len(ids) - 1:
            break
    return found


def test_bytes_that_are_not_trained_do_not_count(place: Path) -> None:
    """Where tokens have weights, as answers have beside prompts, bits are divided by the bytes that have a loss."""
    weights = [0.0] * 12 + [0.5] * 4
    examples = [{"input_ids": [*f"what is {n:2d}?".encode(), *b" four"], "weights": weights} for n in range(20)]
    (place / "answers.jsonl").write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    (place / "answers.toml").write_text(ANSWERS)
    assert drawloom(place, "run", "answers.toml")[0].code == 0
    printed = drawloom(place, "evaluate", "runs/answers")[0].text
    loss, weight, bits = map(float, re.findall(r"loss ([\d.]+) over ([\d.]+) tokens.* ([\d.]+) bits", printed)[0])
    assert weight % 2 == 0 and bits == pytest.approx(loss / math.log(2), rel=1e-4)


def test_a_run_of_a_store_is_measured_on_other_text(place: Path) -> None:
    """Not on its store: what it prints is what the same weights have that were trained on files."""
    assert drawloom(place, "tokenize", "corpus/*.py", "--to", "store")[0].code == 0
    words = ("tokens.use=data.tokenized", "tokens.path=store", "run.name=stored", "trainer.steps=4")
    assert drawloom(place, "run", "tiny.toml", *words)[0].code == 0
    printed = drawloom(place, "evaluate", "runs/stored", "--corpus", "corpus/part1.py")[0].text
    assert f"over {len((place / 'corpus/part1.py').read_bytes())} tokens" in printed
    (place / "empty.txt").touch()
    refused = drawloom(place, "evaluate", "runs/stored", "--corpus", "empty.txt")[0]
    assert refused.code == 2 and "--corpus: there is nothing to predict in empty.txt" in refused.text
    (place / "latin.txt").write_bytes(b"caf\xe9")
    refused = drawloom(place, "evaluate", "runs/stored", "--corpus", "latin.txt")[0]
    assert refused.text.startswith("--corpus: ") and "latin.txt: byte 3 (0xe9) is not UTF-8" in refused.text


def test_embeddings_are_the_means_of_hidden_states(place: Path) -> None:
    """Of each document on its own, or those of its first or last token, as transformers has them of the export."""
    from transformers import AutoModelForCausalLM  # takes seconds

    (place / "some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("def f(x):", "x", "y" * 99)))
    words = ("some.jsonl", "--to", "some.safetensors", "--layers", "0", "1", "--context", "20", "--rows", "2")
    outcome = drawloom(place, "embed", "runs/tiny", *words)[0]
    assert outcome.code == 0 and "wrote some.safetensors, 3 x 2 x 16 numbers" in outcome.text, outcome.text
    for pool in ("first", "last"):
        assert drawloom(place, "embed", "runs/tiny", *words, "--pool", pool, "--to", f"{pool}.safetensors")[0].code == 0
    found, first, last = (
        load_file(place / f"{name}.safetensors")["hidden_states"] for name in ("some", "first", "last")
    )
    theirs = AutoModelForCausalLM.from_pretrained(place / "runs/tiny/export")
    for row, text in enumerate((b"def f(x):", b"x", b"y" * 20)):
        states = theirs(torch.tensor([[*text]]), output_hidden_states=True).hidden_states
        for place_, expected in enumerate(states):
            torch.testing.assert_close(found[row, place_], expected[0].mean(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(first[row, place_], expected[0, 0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(last[row, place_], expected[0, -1], rtol=1e-4, atol=1e-5)
    (place / "empty.jsonl").write_text('{"text": ""}\n')
    empty = drawloom(place, "embed", "runs/tiny", "empty.jsonl", "--to", "empty.safetensors")[0]
    assert "1 of the documents without a token: their numbers are 0" in empty.text
    refused = drawloom(place, "embed", "runs/tiny", "some.jsonl", "--to", "new.safetensors", "--layers", "2")[0]
    assert refused.code == 2 and "--layers: there is no layer 2; the model has 0 to 1" in refused.text


def test_an_earlier_checkpoint_is_exported_and_sampled(place: Path) -> None:
    """The export says of which step it is; a step without a checkpoint is refused."""
    assert drawloom(place, "export", "runs/tiny", "--step", "8", "--to", "eight")[0].code == 0
    assert json.loads((place / "eight/trainer_state.json").read_text())["global_step"] == 8
    assert drawloom(place, "generate", "runs/tiny", "--best", "--prompt", "def", "--tokens", "3")[0].code == 0
    refused = drawloom(place, "generate", "runs/tiny", "--step", "5", "--prompt", "x")[0]
    assert refused.code == 2 and refused.text.startswith("--step 5: runs/tiny has checkpoints of steps 4, 8, 10")
