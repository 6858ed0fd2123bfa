"""Port for a teacher's stored predictions, from which a student learns (distillation)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from drawloom.components.ports.corpus import Split
from drawloom.graph import port


@port
class TeacherPredictions(Protocol):
    """Likeliest tokens by row, with their log-probabilities under the teacher."""

    def check_written_for_rows(self, identity: Mapping[str, Any]) -> None:
        """Raise UserError if the predictions belong to rows with another identity: fingerprints and a seed."""
        ...

    def read_top_ids_and_logps(self, split: Split, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """
        Return ids, int64 (rows, length, k), and log-probabilities, float32 (rows, length, k + 1), of the rows.

        Position i predicts token i + 1, as targets do. The last log-probability is that of all other tokens together.
        """
        ...
