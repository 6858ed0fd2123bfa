"""Rows of user-defined examples."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.data.collated import Collated
from drawloom.components.data.pad_collator import PadCollator
from drawloom.components.ports.data import Example, require_token_batch
from drawloom.components.ports.model import LanguageModel
from drawloom.graph import Every, ResolvedRecipe, UserError
from drawloom.graph.testing import fake
from support.chat import tokenizer_folder
from support.runs import drawloom, write_corpus

OWN = """
extends = "tiny.toml"
unset = ["corpus", "tokens"]

[tokenizer]
use = "data.hugging_face_tokenizer"
path = "tokenizer"

[examples]
use = "data.json_examples"
paths = ["own.jsonl"]

[collator]
use = "data.pad_collator"

[packing]
use = "data.collated"
max_length = 8

[trainer]
steps = 20
on_finish = []
"""

IDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 1]]


@attrs.frozen
class Own:
    """User-defined examples, as a list, another sequence, or an iterable."""

    kind: str = "list"
    ids: list[list[int]] = attrs.field(factory=lambda: IDS)

    def examples(self, split: str) -> Iterable[Example]:
        split_examples: list[Example] = [
            {"input_ids": ids, "source": f"mine:{number}"} for number, ids in enumerate(self.ids)
        ]
        split_examples = split_examples if split == "train" else split_examples[:1]
        kinds: dict[str, Any] = {
            "list": split_examples,
            "sequence": Lazy(split_examples),
            "iterable": iter(split_examples),
        }
        collection: Iterable[Example] = kinds[self.kind]
        return collection


@attrs.frozen
class Lazy:
    """Has a length and items, as a data set of Hugging Face's, and is no Sequence."""

    held: list[Example]

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> Example:
        return self.held[number]


def open_rows(data: Own, **settings: Any) -> Collated:
    rows = Collated(data=data, collator=PadCollator(), **{"max_length": 8, **settings})
    rows.open()
    return rows


@pytest.mark.parametrize("kind", ["list", "sequence", "iterable"])
def test_each_example_is_a_row(kind: str) -> None:
    """For any source, rows come in the order of examples, as long as the longest; also in another process."""
    rows = open_rows(Own(kind))
    assert (rows.length, rows.count_rows("train"), rows.count_rows("validation")) == (5, 3, 1)
    assert rows.fill_rate("train") == 10 / 15
    unpickled = pickle.loads(pickle.dumps(rows)) if kind != "iterable" else rows
    batch = require_token_batch(unpickled.batch("train", [2, 0]), "test")
    assert batch.tokens.tolist() == [[6, 7, 8, 9, 1], [1, 2, 3, 0, 0]] and batch.token_count == 8
    assert rows.describe_row_origins("train", 1) == ["mine:1"]


def test_the_length_is_a_multiple_up_to_the_greatest() -> None:
    """The length is a multiple within the maximum."""
    lengths = [
        open_rows(Own(), multiple=multiple, max_length=most).length for multiple, most in ((4, 9), (3, 9), (4, 7))
    ]
    assert lengths == [8, 6, 7]


def test_a_bad_example_is_named() -> None:
    """A too long example is named at opening, and one with an unknown id when it is read, by its source."""
    with pytest.raises(UserError, match=r"^mine:2: it has 5 tokens, and rows 4; cut it, or raise max_length"):
        open_rows(Own(), max_length=4)
    rows = open_rows(Own(), models=Every({"model": fake(LanguageModel, vocab_size=9)}))
    assert rows.batch("train", [0, 1]).weights.shape == (2, 5)
    with pytest.raises(UserError, match=r"^mine:2: it has ids outside of the model's vocabulary, 0 to 8"):
        rows.batch("train", [0, 2])


def test_other_examples_are_refused_at_a_resume() -> None:
    """An example with another token is refused, and so are fewer examples, unless changes are accepted."""
    state = open_rows(Own()).state_dict()
    open_rows(Own("iterable")).load_state_dict(state)
    for ids, message in (
        ([*IDS[:2], [6, 7, 8, 9, 2]], "train had other tokens in its 3 rows"),
        (IDS[1:], "had 3 rows"),
    ):
        with pytest.raises(UserError, match=message):
            open_rows(Own(ids=ids)).load_state_dict(state)
        open_rows(Own(ids=ids), recipe=ResolvedRecipe("", "", accept_changes=True)).load_state_dict(state)


def test_examples_longer_than_the_models_positions_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The longest example counts, and not the multiple to which rows are rounded up."""
    for longest, count in ((5, 0), (4, 1)):
        model = fake(LanguageModel, vocab_size=10, max_sequence_length=longest)
        open_rows(Own(), multiple=8, models=Every({"model": model}))
        assert len(caplog.records) == count
    assert "has 5 tokens, and the positions of [model] are made for 4" in caplog.text


def test_a_tokenizer_file_may_be_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    """Rows opened before the tokenizer know its vocabulary: a run trains, and an example with other ids is named."""
    write_corpus(tmp_path)
    tokenizer_folder(tmp_path / "tokenizer")
    examples = [{"input_ids": [number, 1, 2, 3]} for number in range(40)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, examples)))
    (tmp_path / "own.toml").write_text(OWN)
    [outcome] = drawloom(tmp_path, "run", "own.toml")
    assert outcome.code == 0, outcome.text
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, [*examples, {"input_ids": [1, 2, 1000]}])))
    [outcome] = drawloom(tmp_path, "run", "own.toml", "run.name=other", "data.workers=1")
    assert outcome.code == 1 and "own.jsonl:41" in outcome.text and "outside of the model's vocabulary" in outcome.text
