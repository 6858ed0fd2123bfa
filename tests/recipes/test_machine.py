"""`check` reports missing files and devices with which a run would end at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.chat import tokenizer_folder


def check_problems(*words: str) -> list[str]:
    """Return the problems from `check` as texts."""
    try:
        return [str(problem) for problem in Recipe.load(*words).check()]
    except RecipeError as error:
        return [str(problem) for problem in error.problems]


def write_lines(path: Path, *rows: Any) -> str:
    """Write JSON lines; return the setting of a corpus over them."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return f'["{path}"]'


def test_check_reports_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` reports a missing GPU only if the recipe needs one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_problems("first_run") == []
    [problem] = check_problems("first_run", "device.kind=cuda")
    assert problem.startswith("command line: [device] kind: the device is 'cuda', but torch finds no GPU here")


@pytest.mark.parametrize("use", ["text_files", "jsonl", "parquet"])
def test_check_reports_corpus_without_files(use: str, tmp_path: Path) -> None:
    """The message names the glob."""
    [problem] = check_problems("first_run", f"corpus.use=data.{use}", f'corpus.paths=["{tmp_path}/*.txt"]')
    assert problem.startswith(f'command line: [corpus] paths: no file matches "{tmp_path}/*.txt"')


def test_check_reports_unreadable_tokenizer_once(tmp_path: Path) -> None:
    """A missing file, or a missing end token, is reported once, and not again for the model and the rows."""
    words = "first_run", "tokenizer.use=data.hugging_face_tokenizer"
    [problem] = check_problems(*words, f"tokenizer.path={tmp_path / 'none'}")
    assert f"[tokenizer] path: there is no file {tmp_path / 'none'}" in problem
    folder = tokenizer_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    [problem] = check_problems(*words, f"tokenizer.path={folder}")
    assert "[tokenizer] end_token: " in problem and "write one of " in problem
    assert check_problems(*words, f"tokenizer.path={folder}", "tokenizer.end_token=</s>") == []


def test_check_reports_too_small_vocabulary(tmp_path: Path) -> None:
    """A vocabulary smaller than the tokenizer's is reported, whether the model or only the rows use the tokenizer."""
    words = "model.vocab_size=100", "tokenizer.use=data.hugging_face_tokenizer", f"tokenizer.path={tmp_path}"
    tokenizer_folder(tmp_path)
    [problem] = check_problems("first_run", *words)
    assert problem.startswith("command line: [model] vocab_size: the tokenizer has ")
    other = {"other": {"use": "data.bytes"}, "model": {"tokenizer": "@other", "vocab_size": 257}}
    apart = Recipe.load("first_run", *words[1:]).with_values(
        other | {name: {"tokenizer": "@tokenizer"} for name in ("export", "tokens", "sample")}
    )
    with pytest.raises(RecipeError, match=r"\[packing\] the tokenizer has \d+ ids, but .* only 257"):
        apart.check()


def test_lines_in_another_format_are_reported(tmp_path: Path) -> None:
    """ShareGPT conversations, chats for DPO, preferences for chat, and lines without the text field are reported."""
    sharegpt = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]}
    chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}
    pair = {"prompt": "hello", "chosen": "there", "rejected": "you"}
    folder = tokenizer_folder(tmp_path / "tokenizer")
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(folder)}

    def open_tokens(use: str, row: Any) -> list[str]:
        paths = json.loads(write_lines(tmp_path / "lines.jsonl", row))
        recipe = Recipe.of({"tokens": {"use": use, "paths": paths, "tokenizer": tokenizer}})
        with recipe.project.container(recipe.graph, "tokens") as _:
            return []

    for use, row in (("conversations", sharegpt), ("conversations", pair), ("preferences", chat)):
        with pytest.raises(RecipeError, match=rf"{tmp_path}/lines.jsonl:1: it has {', '.join(row)}; write \{{"):
            open_tokens(f"data.{use}", row)
    paths = write_lines(tmp_path / "texts.jsonl", sharegpt)
    [problem] = check_problems("first_run", "corpus.use=data.jsonl", f"corpus.paths={paths}")
    assert f'{tmp_path}/texts.jsonl:1: the object has no field "text", only conversations' in problem
