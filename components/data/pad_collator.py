"""Collator with padding to a common length."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from drawloom import between, component, setting
from drawloom.ports import IGNORE_INDEX, Batch, Example, TokenBatch


@component
class PadCollator:
    """
    Rows from `input_ids`, padded on one side.

    A token's target is the next token in its example. A target has no loss if its label in `labels` is IGNORE_INDEX
    (-100); otherwise its weight is the one in `weights`, or 1. The padding is a separate document, so no token
    attends to it.
    """

    batch_type: ClassVar[type[Batch]] = TokenBatch

    side: Literal["left", "right"] = setting("padding side", default="right")
    pad_id: int = setting("padding token id", default=0, check=between(0, 2**31))

    def count_tokens(self, example: Example) -> int:
        """Count an example's tokens. Raises ValueError if it is empty or padded, or if labels differ in length."""
        if "input_ids" not in example:
            raise ValueError(f"it has {', '.join(example) or 'no keys'}, but not the token ids, input_ids")
        tokens = len(example["input_ids"])
        for key in ("labels", "weights"):
            if example.get(key) is not None and len(example[key]) != tokens:
                raise ValueError(f"it has {tokens} input_ids, but {len(example[key])} {key}; write one for each")
        if 0 in example.get("attention_mask", ()):
            raise ValueError("its attention_mask is 0 for padding, which rows get here; leave it out of input_ids")
        if not tokens:
            raise ValueError("its input_ids are empty; leave it out")
        return tokens

    def collate(self, examples: Sequence[Example], length: int) -> TokenBatch:
        """Return rows for examples with at most `length` tokens; every tensor is (examples, length)."""
        shape = len(examples), length
        tokens, targets = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        padding = np.ones(shape, np.bool_)
        weights, positions, documents = (np.zeros(shape, dtype) for dtype in (np.float32, np.int64, np.int64))
        for row, example in enumerate(examples):
            count = self.count_tokens(example)
            begin = length - count if self.side == "left" else 0
            example_span, padding_span = slice(begin, begin + count), slice(0, begin) if begin else slice(count, length)
            tokens[row, example_span] = _convert_to_ids(example["input_ids"])
            targets[row, begin : begin + count - 1], weights[row, begin : begin + count - 1] = (
                _shift_targets_and_weights(example)
            )
            for span in (example_span, padding_span):
                positions[row, span] = np.arange(span.stop - span.start)
            documents[row, max(example_span.start, padding_span.start) :] = 1
            padding[row, example_span] = False
        return TokenBatch.from_numpy(
            tokens=tokens,
            targets=targets,
            positions=positions,
            document_ids=documents,
            weights=weights,
            padding=padding,
        )


def _shift_targets_and_weights(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """
    Return targets for all tokens but the last, and their weights. Raises ValueError for invalid labels or weights.
    """
    targets = _convert_to_ids(example["input_ids"])[1:]
    weights = np.ones(len(targets), np.float32)
    if example.get("weights") is not None:
        weights = np.asarray(example["weights"], np.float32)[1:]
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("one of its weights is negative or not a finite number")
    if example.get("labels") is not None:
        labels = _convert_to_ids(example["labels"])[1:]
        if ((labels != IGNORE_INDEX) & (labels != targets)).any():
            raise ValueError(f"one of its labels is neither its token, unshifted, nor {IGNORE_INDEX}")
        targets, weights = labels, np.where(labels == IGNORE_INDEX, np.float32(0), weights)
    return targets, weights


def _convert_to_ids(numbers: Any) -> np.ndarray:
    """Convert values to ids, int64 (values,). Raises ValueError unless they are a sequence with only integers."""
    ids = np.asarray(numbers)
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
        raise ValueError(f"its ids are {ids.dtype} of shape {ids.shape} and not a sequence of integers")
    return ids.astype(np.int64)
