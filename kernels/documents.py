"""
Documents for recurrences, whose states start at zero in every document.

Recurrent operations compare document numbers on the device; the host never waits for the borders.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RecurrentDocuments(NamedTuple):
    """
    Document numbers by token, int32 (rows, length), and for the incoming states.

    `before` is int32 (rows,); -1 stands for no document. Numbers increase along a row by 1 or 0.
    """

    ids: Tensor
    before: Tensor


def number_recurrent_documents(document_ids: Tensor) -> RecurrentDocuments:
    """Number the runs of equal ids, int64 (rows, length), in every row; there is no incoming state."""
    changes = torch.zeros_like(document_ids, dtype=torch.int32)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    ids = changes.cumsum(1, dtype=torch.int32)
    return RecurrentDocuments(ids, ids.new_full((len(ids),), -1))
