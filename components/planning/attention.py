"""
Estimate of attention's query-key pairs in rows with several documents, and the packed kernel's fraction.

The estimate assumes that a document ends after every token with the same probability, close to the result of packing.
Two tokens are then in the same document with a probability falling exponentially with their distance.
"""

import math
from collections.abc import Mapping

import attrs
import numpy as np

from drawloom.ports import ForwardFlops


@attrs.frozen
class MicrobatchRows:
    """`count` rows of `length` tokens; documents have the mean length `document`, or inf for one document per row."""

    count: int
    length: int
    document: float = math.inf

    @property
    def _same_document_probability(self) -> float:
        """Return the probability that a token continues the previous token's document."""
        return 1 - 1 / self.document

    def count_expected_pairs_per_row(self, window: int | None = None) -> float:
        """Return a row's expected number of query-key pairs, optionally within a window of tokens."""
        distances = np.arange(self.length if window is None else min(window, self.length))
        return float(((self.length - distances) * self._same_document_probability**distances).sum())

    @property
    def all_rows_one_document_probability(self) -> float:
        """Return the probability that every row is a single document."""
        return self._same_document_probability ** (self.count * (self.length - 1))


@attrs.frozen
class AttentionFractions:
    """Fractions for attention: `pairs`, computed query-key pairs; `packed`, the packed kernel's share in them."""

    pairs: float = 1.0
    packed: float = 0.0


def estimate_attention_fractions(
    forward_flops: ForwardFlops | None, rows: MicrobatchRows, all_rows_one_document_probability: float
) -> AttentionFractions:
    """
    Estimate a model's fractions for causal attention inside documents and windows, averaged over its layers.

    `all_rows_one_document_probability` is for rows to which layers without a window apply the kernel for single
    documents.
    """
    per_pair: Mapping[int | None, float] = (
        forward_flops.per_pair if forward_flops is not None and forward_flops.per_pair else {None: 1.0}
    )
    seen = sum(flops * rows.count_expected_pairs_per_row(window) for window, flops in per_pair.items())
    whole = (
        per_pair.get(None, 0.0)
        * all_rows_one_document_probability
        * MicrobatchRows(rows.count, rows.length).count_expected_pairs_per_row()
    )
    return AttentionFractions(seen / sum(per_pair.values()) / rows.length**2, 1 - whole / seen)
