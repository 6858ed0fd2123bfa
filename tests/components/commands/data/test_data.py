"""The command for showing and auditing data; `tests/runs/test_data.py` audits runs."""

import json
from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from support.chat import say, tokenizer_folder
from support.runs import write_corpus
from support.stores import damage, store_of

NONE = "validation_fraction=0.0"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a small recipe in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    return "tiny.toml"


def test_statistics_are_shown(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a row there is a line for each split: rows, fill rate, documents, tokens, lengths; then the overlap."""
    assert main(["data", "show", recipe]) == 0
    _, train, validation, copies = capsys.readouterr().out.splitlines()
    assert copies == "0 validation documents are also in the training split"
    assert train.split() == ["train", "56", "99.330", "10", "1,780", "176,", "176,", "178.0,", "186"]
    assert validation.split()[:5] == ["validation", "11", "100.000", "2", "352"]


def test_copies_in_both_splits_are_counted(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a store for either split, validation documents also in training are counted, each copy once."""
    store_of(tmp_path / "one", [["abc", "abd", "abcd", "abc"]])
    store_of(tmp_path / "other", [["abd", "abe", "abc", "abd", "abcde"]])
    words = ["tokens.use=data.tokenized", "tokens.path=one", "tokens.validation_path=other", "packing.length=4"]
    assert main(["data", "show", recipe, *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 validation documents are also in the training split"


def test_the_sources_of_a_mixture_are_shown(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source has a line below its split, in training with its share of tokens and rows; a row names its source."""
    store_of(tmp_path / "one", [["abc"] * 9])
    store_of(tmp_path / "other", [["defghij"] * 6])
    sources = [f"tokens.sources.{name}={{use='data.tokenized',path='{name}',{NONE}}}" for name in ("one", "other")]
    words = ["tokens.use=data.mixture", *sources, "tokens.weights={one=1.0,other=3.0}", "packing.length=8"]
    assert main(["data", "show", recipe, "packing.use=data.packing.padded", *words]) == 0
    head, train, one, other, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("share of tokens, of rows")
    assert train.split()[:5] == ["train", "15", "70.000", "15", "84"]
    assert one.split()[:5] == ["one", "9", "50.000", "9", "36"] and one.endswith("25.00 %, 40.00 %")
    assert other.split()[:5] == ["other", "6", "100.000", "6", "48"] and other.endswith("75.00 %, 60.00 %")
    assert main(["data", "show", recipe, "packing.use=data.packing.padded", *words, "--row", "9"]) == 0
    assert "[0:8] other: part 0:4, positions 0 to 7" in capsys.readouterr().out


def test_a_row_is_shown_with_its_documents(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each document has its file, positions and weights, and its tokens as text, apart from one another."""
    assert main(["data", "show", recipe, "packing.use=data.packing.padded", "packing.length=200", "--row", "1"]) == 0
    head, document, *text, padding = capsys.readouterr().out.splitlines()
    assert head == "train row 1: 200 tokens, 175 targets"
    assert document.startswith("[0:176] corpus/part") and document.endswith("positions 0 to 175, weights add up to 175")
    assert text[0].startswith("d|⟦e|f| |f") and text[-1].endswith("<end>⟧")
    assert padding == "[176:200] padding, positions 0 to 23, weights add up to 0"


def test_trained_parts_of_a_conversation_are_marked(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer and its end token are marked, and control tokens are escaped: nothing reaches the terminal as such."""
    tokenizer_folder(Path("tokenizer"))
    rows = [json.dumps({"messages": say(f"hello {number}", "good\x1b day")}) for number in range(3)]
    Path("chat.jsonl").write_text("\n".join(rows), "utf-8")
    words = (
        "tokenizer.use=data.hugging_face_tokenizer",
        "tokenizer.path=tokenizer",
        "tokens.use=data.conversations",
        'tokens.paths=["chat.jsonl"]',
        "tokens.validation_fraction=0.0",
    )
    assert main(["data", "show", recipe, "--row", "0", *words]) == 0
    shown = capsys.readouterr().out.replace("|", "")
    assert "<im_start>assistant⏎\n⟦good\\x1b day<im_end>⟧" in shown, shown


def test_a_missing_row_or_record_is_refused(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row beyond the last, and a run without a record, are errors in one line with a remedy."""
    assert main(["data", "show", recipe, "--row", "56"]) == 2
    assert "--row 56: train has rows 0 to 55" in capsys.readouterr().err
    words = ("--split", "validation", "corpus.validation_fraction=0.0")
    assert main(["data", "show", recipe, "--row", "0", *words]) == 2
    assert "--row 0: validation has no rows" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["data", "audit", str(tmp_path)]) == 2
    assert "has no record of its rows; record them with record.use=data.record" in capsys.readouterr().err


def test_a_store_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole store is said to be; a changed byte is found, and its file named."""
    store_of(tmp_path / "store", [["abc"], ["de"]])
    assert main(["verify", str(tmp_path / "store")]) == 0
    assert "2 shards, 7 tokens, all as they were written" in capsys.readouterr().out
    damage(tmp_path / "store" / "00001.tokens")
    assert main(["verify", str(tmp_path / "store")]) == 1
    assert "00001.tokens has other content" in capsys.readouterr().out


def test_a_recipe_cannot_be_audited(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe given to `audit` or `verify` is refused with its path."""
    assert main(["data", "audit", recipe]) == 2 and "tiny.toml is not a run folder" in capsys.readouterr().err
    assert main(["verify", recipe]) == 2 and "tiny.toml is not a folder" in capsys.readouterr().err
