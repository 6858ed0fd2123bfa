"""Judged answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawloom.components.data.feedback import Feedback
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.graph import UserError
from support.chat import say, tokenizer_folder


def open_feedback(folder: Path, *lines: Any, fraction: float = 0.0) -> Feedback:
    path = folder / "judged.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    tokenizer = HuggingFaceTokenizer(path=tokenizer_folder(folder / "tokenizer"))
    tokenizer.open()
    corpus = Feedback(tokenizer=tokenizer, paths=[str(path)], validation_fraction=fraction)
    corpus.open()
    return corpus


def read(corpus: Feedback) -> list[tuple[str, str, float, float]]:
    """Return the prompt, the trained text, the sum of weights and the label of every document."""
    documents, result = corpus.documents("train"), []
    for number, length in enumerate(documents.lengths):
        part = documents.read(number, 0, int(length))
        assert part.weights is not None and part.label is not None
        trained = part.weights > 0
        decode = corpus.tokenizer.decode_with_control_tokens
        ids = np.asarray(part.ids)
        result.append(
            (decode(ids[~trained].tolist()), decode(ids[trained].tolist()), float(part.weights.sum()), part.label)
        )
    return result


def test_each_answer_has_a_mismatched_one_of_the_next_line(tmp_path: Path) -> None:
    """Both documents have the line's prompt, together the weight 1, and the label only in the first."""
    lines = [{"prompt": f"p{n}", "completion": f"answer{n}", "label": n != 1} for n in range(3)]
    corpus = open_feedback(tmp_path, *lines)
    documents = read(corpus)
    assert len(documents) == 6
    for n in range(3):
        (prompt, own, weight, label), (again, other, rest, none) = documents[2 * n : 2 * n + 2]
        assert prompt == again == f"p{n}" and label == (-1.0 if n == 1 else 1.0) and none == 0.0
        assert own.startswith(f"answer{n}") and other.startswith(f"answer{(n + 1) % 3}")
        assert weight + rest == pytest.approx(1)


def test_messages_are_rendered_with_the_prompts_of_their_line(tmp_path: Path) -> None:
    """A mismatched answer stands where the template puts the answer of its own line."""
    lines = [{"prompt": say(f"q{n}"), "completion": say("", f"a{n}")[1:], "label": True} for n in range(2)]
    documents = read(open_feedback(tmp_path, *lines))
    prefix = "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
    assert documents[0][0].startswith(prefix) and documents[1][0].startswith(prefix)
    assert documents[0][1].startswith("a0") and documents[1][1].startswith("a1")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], "its label is None; write"),
        ([{"prompt": "a", "completion": "b", "label": 1}], "its label is 1; write"),
        ([{"prompt": "a", "label": True}], "it has prompt, label; write a prompt and a completion"),
        ([{"prompt": "a", "completion": "b", "label": True}], "the train split has one answer"),
    ],
)
def test_lines_without_a_judgement_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    """A missing label, a label of another type, and a single line end with the form of a line or the split."""
    with pytest.raises(UserError, match=message):
        open_feedback(tmp_path, *lines)
