"""The collator for padding."""

from typing import Any

import pytest

from drawloom.components.data.pad_collator import PadCollator

EXAMPLES: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
    {"input_ids": [8, 9], "weights": [1.0, 0.25]},
    {"input_ids": [1, 2, 3, 4]},
]


def test_padding_is_on_one_side() -> None:
    """Tokens, targets, weights and positions are the same on either side of padding."""
    right = PadCollator(pad_id=0).collate(EXAMPLES, 4)
    assert right.tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]]
    assert right.targets.tolist() == [[-100, 7, -100, -100], [9, -100, -100, -100], [2, 3, 4, -100]]
    assert right.weights.tolist() == [[0, 1, 0, 0], [0.25, 0, 0, 0], [1, 1, 1, 0]]
    assert right.positions.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert right.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    left = PadCollator(side="left", pad_id=3).collate(EXAMPLES, 4)
    assert left.tokens.tolist() == [[3, 5, 6, 7], [3, 3, 8, 9], [1, 2, 3, 4]]
    assert left.targets.tolist() == [[-100, -100, 7, -100], [-100, -100, 9, -100], [2, 3, 4, -100]]
    assert left.weights.tolist() == [[0, 0, 1, 0], [0, 0, 0.25, 0], [1, 1, 1, 0]]
    assert left.positions.tolist() == [[0, 0, 1, 2], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert left.document_ids.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"ids": [1]}, "it has ids, but not the token ids, input_ids"),
        ({"input_ids": []}, "its input_ids are empty"),
        ({"input_ids": [1, 2], "labels": [1]}, "it has 2 input_ids, but 1 labels"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, None),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "one of its labels is neither its token, unshifted, nor -100"),
        ({"input_ids": [1, 2], "weights": [1, -1]}, "one of its weights is negative"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "its attention_mask is 0 for padding"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, None),
        ({"input_ids": [1.5, 2.0]}, "its ids are float64 of shape"),
    ],
)
def test_a_malformed_example_is_refused(example: dict[str, Any], message: str | None) -> None:
    """The message shows the example and the required form."""
    if message is None:
        PadCollator().collate([example], 2)
        return
    with pytest.raises(ValueError, match=message):
        PadCollator().collate([example], 2)
