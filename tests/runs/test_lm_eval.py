"""Tasks of lm-eval-harness on a run, against the harness's own model on the run's export."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.runs import drawloom, write_corpus

TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "def {{name}}(x):\n    return x *",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": [" 1 + 2", " 3", " (x, x, x)"],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "def {{name}}(x):",
        "doc_to_target": "\n    return x * 3",
        "generation_kwargs": {"until": ["+", "\n\n"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and with tasks that need no network."""
    folder = tmp_path_factory.mktemp("tasks")
    write_corpus(folder)
    words = ("trainer.steps=12", "optimizer.lr=0.01", "evaluate.every=6", "checkpoint.every=12")
    assert drawloom(folder, "run", "tiny.toml", *words)[0].code == 0
    (folder / "tasks").mkdir()
    rows = [{"name": f"f{n}_{n % 3}", "answer": n % 3, "text": f"def g{n}(y):\n    return y\n" * 5} for n in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for name, task in TASKS.items():
        text = json.dumps({"task": name, **data, "test_split": "test", **task})  # YAML reads JSON
        (folder / "tasks" / f"{name}.yaml").write_text(text, "utf-8")
    return folder


@pytest.mark.soak  # importing the harness and transformers takes 30 s
@pytest.mark.filterwarnings("ignore")  # warnings of the harness and its packages
def test_results_equal_the_harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, perplexities and generated text agree, also for texts longer than the context."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    words = ("--tasks", *TASKS, "--include", "tasks", "--context", "64", "--rows", "4", "--to", "found.json")
    [outcome] = drawloom(folder, "lm-eval", "runs/tiny", *words)
    assert outcome.code == 0, outcome.text
    assert "runs/tiny, step 12:" in outcome.text and "choose  acc " in outcome.text, outcome.text
    manager = TaskManager(include_path=str(folder / "tasks"))
    model = HFLM(str(folder / "runs/tiny/export"), max_length=64, device="cpu", dtype="float32", batch_size=1)
    theirs: Any = lm_eval.simple_evaluate(model, tasks=[*TASKS], task_manager=manager)
    ours = json.loads((folder / "found.json").read_text())["results"]
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)


@pytest.mark.soak  # reading the harness's thousands of tasks takes 15 s
def test_an_unknown_task_is_refused(folder: Path) -> None:
    """An unknown task is named in the error before the run is opened."""
    pytest.importorskip("lm_eval")
    [outcome] = drawloom(folder, "lm-eval", "runs/none", "--tasks", "choose", "chose", "--include", "tasks")
    assert outcome.code == 2 and "--tasks: no task is called 'chose'" in outcome.text, outcome.text


@pytest.mark.soak  # the harness tries for 20 s
def test_a_task_that_cannot_be_downloaded_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the command prints a message and no traceback."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing answers
    [outcome] = drawloom(folder, "lm-eval", "runs/tiny", "--tasks", "arc_easy", "--limit", "1")
    assert outcome.code == 1 and "the data of a task can't be downloaded" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text
