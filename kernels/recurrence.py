"""
Documents of a recurrence, whose state starts at zero in every document.

Recurrent operations compare numbers of documents on the device, so that the host never waits for the borders.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RecurrentDocuments(NamedTuple):
    """
    Number of each token's document, int32 (rows, length), and of the document that an incoming state belongs to.

    `before` is int32 (rows,); -1 is the number of no document. Numbers increase along a row by 1 or 0.
    """

    ids: Tensor
    before: Tensor


def recurrent_documents(document_ids: Tensor) -> RecurrentDocuments:
    """Number the runs of equal ids, int64 (rows, length), in each row; there is no incoming state."""
    changes = torch.zeros_like(document_ids, dtype=torch.int32)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    ids = changes.cumsum(1, dtype=torch.int32)
    return RecurrentDocuments(ids, ids.new_full((len(ids),), -1))
