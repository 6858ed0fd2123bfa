"""Conversations as a corpus of token ids."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from drawloom.components.data.conversations import Conversations
from drawloom.components.ports.corpus import TokenCorpus
from drawloom.graph import UserError
from drawloom.graph.types.port_match import find_mismatches
from support.chat import CHATML, THINKING, TOOLS, open_tokenizer, say, tokenizer_folder


def corpus(folder: Path, *rows: Any, template: str | None = CHATML, **settings: Any) -> Conversations:
    """Return the conversations of these lines, open."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    tokenizer = open_tokenizer(tokenizer_folder(folder / "tokenizer", template))
    made = Conversations(
        tokenizer=tokenizer, paths=[str(folder / "rows.jsonl")], **({"validation_fraction": 0.0} | settings)
    )
    made.open()
    return made


def trained_texts(made: Conversations) -> list[str]:
    """Return the rows' trained text."""
    documents = made.documents("train")
    tokenizer: Any = made.tokenizer
    texts = []
    for number, length in enumerate(documents.lengths):
        ids, weights, *_ = documents.read(number, 0, length)
        assert weights is not None
        texts.append(str(tokenizer._tokenizer.decode(ids[weights > 0].tolist(), skip_special_tokens=False)))
    return texts


def test_lines_of_all_forms_are_read(tmp_path: Path) -> None:
    """
    Lines have messages, or prompts and completions as text or messages; a message's own weight precedes its role's.
    """
    quiet = [*say("a", "b"), {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 0}]
    made = corpus(
        tmp_path,
        {"messages": quiet},
        {"prompt": "hello", "completion": " there"},
        {"prompt": say("a", "b", "c"), "completion": say("x", "y")[1:]},
    )
    assert not find_mismatches(Conversations, TokenCorpus)
    assert trained_texts(made) == ["b<|im_end|>", " there</s>", "y<|im_end|>"]


def test_tables_have_the_conversations_of_json_lines(tmp_path: Path) -> None:
    """They also agree if a table fills missing keys of some messages with nulls."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "1"}}}]}
    rows = [{"messages": say("a", "b")}, {"messages": [*say("a"), call]}, {"messages": say("c", "d")}]
    lines = corpus(tmp_path, *rows, template=TOOLS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    table = Conversations(tokenizer=lines.tokenizer, paths=[str(tmp_path / "rows.parquet")], validation_fraction=0.0)
    table.open()
    assert trained_texts(table) == trained_texts(lines)
    assert table.documents("train").fingerprint == lines.documents("train").fingerprint


def test_which_turns_are_trained(tmp_path: Path) -> None:
    """All turns, the last, or one per row are trained, with history rendered as it was when the turn was answered."""
    row = {"messages": say("a", "<think>\nx\n</think>\n\none", "b", "<think>\ny\n</think>\n\ntwo")}
    assert trained_texts(corpus(tmp_path, {"messages": say("a", "one", "b", "two")})) == ["one<|im_end|>two<|im_end|>"]
    answers = ["<think>\nx\n</think>\n\none<|im_end|>", "<think>\ny\n</think>\n\ntwo<|im_end|>"]
    assert trained_texts(corpus(tmp_path, row, template=THINKING, turns="last")) == answers[1:]
    assert trained_texts(corpus(tmp_path, row, template=THINKING, turns="one_row_per_turn")) == answers
    with pytest.raises(UserError, match=r"rows.jsonl:1: turn 2: .*one_row_per_turn"):
        corpus(tmp_path, row, template=THINKING)


def test_a_prompt_that_the_answer_does_not_continue_is_explained(tmp_path: Path) -> None:
    """The reason quotes both texts, and does not propose a value of `turns`: none would help."""
    template = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif")
    for turns in ("all", "last"):
        with pytest.raises(UserError) as error:
            corpus(tmp_path, {"messages": say("a", "one")}, template=template, turns=turns)
        assert "rows.jsonl:1: turn 2: a model answers after '<think>', and" in str(error.value)
        assert "'one<|im_end|>" in str(error.value) and "turns =" not in str(error.value)


def test_roles_have_weights(tmp_path: Path) -> None:
    """A role without a weight is not trained."""
    made = corpus(tmp_path, {"messages": say("a", "b", "c")}, roles={"assistant": 0.5, "user": 0.0})
    (weights,) = [made.documents("train").read(0, 0, 99).weights]
    assert weights is not None and set(weights.tolist()) == {0.0, 0.5}


def test_a_line_without_an_answer_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With all weights zero nothing would be trained, silently; a corpus with only such lines is refused."""
    with caplog.at_level(logging.INFO, "drawloom.data"):
        made = corpus(tmp_path, {"messages": say("a")}, {"messages": say("a", "b")})
    assert trained_texts(made) == ["b<|im_end|>"]
    assert "1 lines have no token to train, and are dropped" in caplog.text
    with pytest.raises(UserError, match="no line has a turn to train; roles has system"):
        corpus(tmp_path, {"messages": say("a", "b")}, roles={"system": 1.0})


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", r"rows.jsonl:2:1: not JSON \(Expecting"),
    "no object": ([1], r"rows.jsonl:2: a line must be an object and not an array"),
    "other keys": ({"conversations": []}, r"rows.jsonl:2: it has conversations; write"),
    "a message without a role": ({"messages": [{"content": "a"}]}, "rows.jsonl:2: turn 1 is not an object with a role"),
    "a weight that is none": ({"messages": [{**say("a")[0], "weight": "x"}]}, "rows.jsonl:2: a turn has weight 'x'"),
    "content that the template can't write": ({"messages": [{"role": "assistant", "content": None}]}, "rows.jsonl:2"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_lines_are_reported_with_their_position(what: str, tmp_path: Path) -> None:
    """The error has file, line and reason."""
    row, text = BAD[what]
    with pytest.raises(UserError, match=text):
        corpus(tmp_path, {"messages": say("a", "b")}, row)


def test_a_template_is_needed(tmp_path: Path) -> None:
    """The tokenizer's, or a file of one's own."""
    row = {"messages": say("a", "b")}
    with pytest.raises(UserError, match=r'no chat template; write template = "chat\.jinja", a file'):
        corpus(tmp_path, row, template=None)
    own = tmp_path / "own.jinja"
    own.write_text(CHATML, "utf-8")
    lines, tokenizer = [str(tmp_path / "rows.jsonl")], open_tokenizer(tmp_path / "tokenizer")
    made = Conversations(tokenizer=tokenizer, paths=lines, template=own, validation_fraction=0.0)
    made.open()
    assert trained_texts(made) == ["b<|im_end|>"] and made.list_input_files() == {"template": [own]}


def test_the_split_depends_on_the_line_alone(tmp_path: Path) -> None:
    """A held-out line stays held out when others are added."""
    lines = [{"messages": say(f"question {number}", f"answer {number}")} for number in range(40)]
    few, many = (corpus(tmp_path, *lines[:count], validation_fraction=0.3) for count in (20, 40))
    counts = [len(made.documents("validation").lengths) for made in (few, many)]
    assert 0 < counts[0] < counts[1] < 30
