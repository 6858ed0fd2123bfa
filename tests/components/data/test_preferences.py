"""Preferences: a corpus of document pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from drawloom.components.data.packing.batches import build_batch
from drawloom.components.data.packing.pieces import RowPiece
from drawloom.components.data.preferences import Preferences
from drawloom.components.ports.corpus import TokenCorpus
from drawloom.graph import UserError
from drawloom.graph.types.port_match import find_mismatches
from support.chat import CHATML, HEADERS, open_tokenizer, say, tokenizer_folder


def corpus(folder: Path, *rows: Any, template: str | None = CHATML, name: str = "rows.jsonl") -> Preferences:
    """Return the pairs of these lines, open."""
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows]), folder / name)
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    tokenizer = open_tokenizer(tokenizer_folder(folder / "tokenizer", template))
    made = Preferences(tokenizer=tokenizer, paths=[str(folder / name)], validation_fraction=0.0)
    made.open()
    return made


def compared_texts(made: Preferences) -> list[tuple[str, str]]:
    """Return both documents' compared texts by pair, and check the weights."""
    documents, tokenizer = made.documents("train"), made.tokenizer
    pairs = []
    for pair in range(len(documents.lengths) // 2):
        texts, total = [], 0.0
        for number in (2 * pair, 2 * pair + 1):
            ids, weights, *_ = documents.read(number, 0, 10**6)
            assert weights is not None
            total += float(weights[1:].sum(dtype=np.float64))
            texts.append(tokenizer.decode_with_control_tokens(ids[weights > 0].tolist()))
        assert total == pytest.approx(1.0, rel=1e-6), "the weights of a pair do not add up to 1"
        pairs.append((texts[0], texts[1]))
    return pairs


ASK = say("a")
ANSWERS = {"chosen": say("a", "yes")[1:], "rejected": say("a", "well, no")[1:]}


def test_lines_of_all_forms_are_read(tmp_path: Path) -> None:
    """
    Texts, messages with a prompt, and messages with a common beginning; only assistant turns after the prompt count.
    """
    long = say("a", "b", "c")
    made = corpus(
        tmp_path,
        {"prompt": "the sky", "chosen": " is blue", "rejected": " is a lie"},
        {"prompt": ASK, **ANSWERS},
        {"chosen": [*long, *say("", "x")[1:]], "rejected": [*long, *say("", "y", "z", "w")[1:]]},
    )
    assert not find_mismatches(Preferences, TokenCorpus)
    assert compared_texts(made) == [
        (" is blue</s>", " is a lie</s>"),
        ("yes<|im_end|>", "well, no<|im_end|>"),
        ("x<|im_end|>", "y<|im_end|>w<|im_end|>"),
    ]


def test_answers_that_repeat_the_prompt_are_refused(tmp_path: Path) -> None:
    """Whole conversations beside their prompt would have the prompt twice; without it they are read."""
    whole = {"chosen": [*ASK, *ANSWERS["chosen"]], "rejected": [*ASK, *ANSWERS["rejected"]]}
    with pytest.raises(UserError, match=r"rows.jsonl:1: an answer begins with the prompt"):
        corpus(tmp_path, {"prompt": ASK, **whole})
    assert compared_texts(corpus(tmp_path, whole)) == [("yes<|im_end|>", "well, no<|im_end|>")]


def test_texts_need_no_template_and_messages_do(tmp_path: Path) -> None:
    """A base model's tokenizer has none."""
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert compared_texts(corpus(tmp_path, texts, template=None)) == [("b</s>", "c</s>")]
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        corpus(tmp_path, texts, {"prompt": ASK, **ANSWERS}, template=None)


def test_a_pair_without_a_difference_is_dropped_as_a_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pairs with equal answers, or without one answer, leave no document, so pairs stay pairs."""
    same = {"prompt": ASK, "chosen": ANSWERS["chosen"], "rejected": ANSWERS["chosen"]}
    none = {"prompt": ASK, "chosen": ANSWERS["chosen"], "rejected": [{"role": "user", "content": "b"}]}
    made = corpus(tmp_path, same, {"prompt": ASK, **ANSWERS}, none)
    assert compared_texts(made) == [("yes<|im_end|>", "well, no<|im_end|>")]
    assert "2 lines have no token to train, and are dropped" in caplog.text
    with pytest.raises(UserError, match="no line has two different answers to compare"):
        corpus(tmp_path, same)


def test_a_pair_has_one_prompt_and_one_beginning(tmp_path: Path) -> None:
    """Both documents begin with the same prompt's ids; the template's BOS is in both once, and in no answer."""
    made = corpus(tmp_path, {"prompt": ASK, **ANSWERS}, template=HEADERS)
    documents, [begin] = made.documents("train"), made.tokenizer.encode_with_control_tokens("<s>").tolist()
    pair = [documents.read(number, 0, 99).ids.tolist() for number in (0, 1)]
    assert [ids.count(begin) for ids in pair] == [1, 1] and pair[0][0] == begin
    starts = [int((documents.read(number, 0, 99).weights > 0).argmax()) for number in (0, 1)]  # type: ignore[operator, union-attr]
    assert starts[0] == starts[1] > 3 and pair[0][: starts[0]] == pair[1][: starts[1]]


def test_parquet_has_the_pairs_of_json_lines(tmp_path: Path) -> None:
    """The pairs agree even if some messages lack keys, filled with nulls in a table."""
    rows = [{"prompt": ASK, **ANSWERS}, {"prompt": [{**ASK[0], "name": "Ann"}], **ANSWERS}]
    template = CHATML.replace("message.role +", "message.role + (message.name if message.name is defined else '') +")
    one = corpus(tmp_path, *rows, template=template)
    other = corpus(tmp_path, *rows, template=template, name="rows.parquet")
    assert one.documents("train").fingerprint == other.documents("train").fingerprint


def test_a_line_of_another_form_is_reported_with_its_position(tmp_path: Path) -> None:
    """The error has file, line, and the accepted forms."""
    with pytest.raises(UserError, match=r'rows.jsonl:2: it has prompt, answer; write {"prompt": ..., "chosen"'):
        corpus(tmp_path, {"prompt": ASK, **ANSWERS}, {"prompt": "a", "answer": "b"})


REFERENCE = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2}


def test_a_reference_belongs_to_its_document(tmp_path: Path) -> None:
    """Each document has its own reference, also in a batch, where it is the sum over the document's tokens."""
    made = corpus(tmp_path, {"prompt": ASK, **ANSWERS, **REFERENCE})
    documents = made.documents("train")
    assert [documents.read(number, 0, 1).reference for number in (0, 1)] == [-1.5, -2.0]
    pieces = [RowPiece(number, 0, int(length)) for number, length in enumerate(documents.lengths)]
    batch = build_batch(documents, [pieces], 128, 0)
    assert batch.reference is not None
    assert [float(batch.reference[batch.document_ids == number].sum()) for number in (0, 1)] == [-1.5, -2.0]
    without = corpus(tmp_path, {"prompt": ASK, **ANSWERS}).documents("train")
    assert build_batch(without, [pieces], 128, 0).reference is None
    assert documents.fingerprint != without.fingerprint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ref_chosen_logps": 0.5}, "ref_chosen_logps is 0.5; write the logarithm of a probability"),
        ({"ref_rejected_logps": "-1"}, "ref_rejected_logps is '-1'"),
        ({"ref_chosen_logps": float("nan")}, "ref_chosen_logps is nan"),
        ({"ref_rejected_logps": None}, "only one of ref_chosen_logps and ref_rejected_logps"),
    ],
)
def test_impossible_references_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """The error has the file and the line."""
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{message}"):
        corpus(tmp_path, {"prompt": ASK, **ANSWERS, **REFERENCE, **changed})


def test_references_of_some_lines_are_refused(tmp_path: Path) -> None:
    """The loss of the others would be another one."""
    with pytest.raises(UserError, match="2 of 4 answers have a reference; write one in every line, or in none"):
        corpus(tmp_path, {"prompt": ASK, **ANSWERS, **REFERENCE}, {"prompt": say("b"), **ANSWERS})
