"""Copies: no corpus has them in both splits."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from drawloom.components.data.conversations import Conversations
from drawloom.components.data.feedback import Feedback
from drawloom.components.data.json_examples import JsonExamples
from drawloom.components.data.jsonl import JsonLines
from drawloom.components.data.labelled_texts import LabelledTexts
from drawloom.components.data.parquet import Parquet
from drawloom.components.data.preferences import Preferences
from drawloom.components.data.text_files import TextFiles
from drawloom.components.ports.corpus import Split
from support.chat import open_tokenizer, say, tokenizer_folder

SPLITS: tuple[Split, ...] = ("train", "validation")
FRACTION = 0.5


def make_row(kind: str, text: str, copy: int) -> dict[str, Any]:
    """Return a line about `text` that differs from other copies by an id, and from other answers to a prompt."""
    prompt, answer = say(text), say("", f"answer {copy}")[1:]
    rows: dict[str, dict[str, Any]] = {
        "text": {"text": text},
        "messages": {"messages": [{**turn, "id": copy} for turn in say(text, "yes")]},
        "completion": {"prompt": text, "completion": "yes"},
        "label": {"text": text, "label": "good" if copy % 2 else "bad"},
        "pair": {"prompt": text, "chosen": f"yes {copy}", "rejected": f"no {copy}"},
        "pair of messages": {"prompt": prompt, "chosen": answer, "rejected": say("", "no")[1:]},
        "pair without a prompt": {"chosen": [*prompt, *answer], "rejected": [*prompt, *say("", "no")[1:]]},
        "feedback": {"prompt": text, "completion": f"yes {copy}", "label": True},
        "rollout": {"prompt": text, "answer": f"yes {copy}"},
    }
    return {"id": copy, **rows[kind]}


def read_prompts(corpus: Any, split: Split) -> list[str]:
    """Return the texts, or the part before a number."""
    if isinstance(corpus, JsonExamples):
        return [example["prompt"] for example in corpus.examples(split)]
    if not hasattr(corpus, "tokenizer"):
        return [*corpus.documents(split)]
    documents = corpus.documents(split)
    parts = [documents.read(number, 0, int(length)).ids for number, length in enumerate(documents.lengths)]
    return [corpus.tokenizer.decode(ids.tolist()).split("#")[0] for ids in parts]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("kind", "component"),
    [
        ("text", JsonLines),
        ("messages", Conversations),
        ("completion", Conversations),
        ("label", LabelledTexts),
        ("pair", Preferences),
        ("pair of messages", Preferences),
        ("pair without a prompt", Preferences),
        ("feedback", Feedback),
        ("rollout", JsonExamples),
    ],
)
def test_copies_and_answers_to_one_prompt_are_in_one_split(
    tmp_path: Path, kind: str, component: type, form: str
) -> None:
    """Lines with other ids only, and all answers to a prompt, are in one split; both splits have some."""
    rows = [make_row(kind, f"text {number}#", 10 * number + copy) for number in range(20) for copy in range(3)]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        component = Parquet if component is JsonLines else component
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options: dict[str, Any] = (
        {}
        if component in (JsonLines, Parquet, JsonExamples)
        else {"tokenizer": open_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))}
    )
    if component is LabelledTexts:
        options["labels"] = ["good", "bad"]
    corpus = component(paths=[str(path)], validation_fraction=FRACTION, **options)
    if hasattr(corpus, "open"):
        corpus.open()
    train, validation = (set(read_prompts(corpus, split)) for split in SPLITS)
    assert len(train) > 2 < len(validation) and len(train | validation) == 20 and not train & validation


def test_an_empty_prompt_is_no_reason_to_share_a_split(tmp_path: Path) -> None:
    """Lines without a prompt are divided by their answers."""
    rows = [{"prompt": "", "chosen": f"yes {number}", "rejected": "no"} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    corpus = Preferences(tokenizer=tokenizer, paths=[str(tmp_path / "rows.jsonl")], validation_fraction=FRACTION)
    corpus.open()
    assert all(len(corpus.documents(split).lengths) for split in SPLITS)


def test_copies_of_files_are_in_one_split(tmp_path: Path) -> None:
    """A text file's name and folder do not matter, and moving it does not change its split."""
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"text {number // 3}")
    corpus = TextFiles(paths=[f"{tmp_path}/*.txt"], validation_fraction=FRACTION)
    train, validation = (set(corpus.documents(split)) for split in SPLITS)
    assert len(train) > 2 < len(validation) and not train & validation
