"""One document in a row."""

from typing import Any

import attrs
import numpy as np

from drawloom.components.data.packing.padded import Padded
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.data import IGNORE_INDEX


@attrs.frozen
class Documents:
    """Two documents, the second longer than a row."""

    vocab_size: int = 99
    eos_id: int = 0

    def documents(self, split: str) -> TokenArrays:
        return TokenArrays.concatenate([np.array([1, 2, 0]), np.array([3, 4, 5, 6, 7, 0])], np.uint16)


def test_a_row_has_one_document(drawloom_opened: Any, job: Any) -> None:
    """Rows are padded at their end; a long document's parts have their own rows, and no target is lost."""
    rows = drawloom_opened(Padded(tokens=Documents(), job=job, length=4))
    batch = rows.batch("validation", range(rows.count_rows("validation")))
    assert batch.tokens.tolist() == [[3, 4, 5, 6], [1, 2, 0, 0], [7, 0, 0, 0]]
    assert batch.targets.tolist() == [[4, 5, 6, 7], [2, 0, *[IGNORE_INDEX] * 2], [0, *[IGNORE_INDEX] * 3]]
    assert batch.document_ids.tolist() == [[0] * 4, [0, 0, 0, 1], [0, 0, 1, 1]]
    assert rows.fill_rate("validation") == 9 / 12
