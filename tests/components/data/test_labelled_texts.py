"""Texts with a label."""

from pathlib import Path

import pytest

from drawloom.components.data.labelled_texts import LabelledTexts
from drawloom.graph import UserError
from support.chat import open_tokenizer, tokenizer_folder


def test_a_number_is_told_from_a_label_of_digits(tmp_path: Path) -> None:
    """Labels are texts: for the number 0, the error shows the labels in quotes."""
    (tmp_path / "mine.jsonl").write_text('{"text": "hello", "label": 0}\n', "utf-8")
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    corpus = LabelledTexts(tokenizer=tokenizer, paths=[str(tmp_path / "mine.jsonl")], labels=["0", "1"])
    with pytest.raises(UserError, match=r"mine\.jsonl:1: its label is 0; write one of '0', '1'"):
        corpus.check_before_open()
