"""A collator that pads examples to one length."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from drawloom.components.ports.data import IGNORE_INDEX, Example, TokenBatch
from drawloom.components.state.batch import Batch
from drawloom.graph import between, component, setting


@component
class PadCollator:
    """
    Rows of `input_ids`, with padding at one side.

    The target of a token is the next of its example. It has no loss if the `labels` are IGNORE_INDEX (-100) there, and
    else the weight that `weights` say, or 1. Padding is a document of its own, which no token attends to.
    """

    batch_type: ClassVar[type[Batch]] = TokenBatch

    side: Literal["left", "right"] = setting(default="right", doc="where padding is added")
    pad_id: int = setting(default=0, check=between(0, 2**31), doc="the token id of padding")

    def count(self, example: Example) -> int:
        """The tokens of an example. Raises ValueError if it has none, or not as many labels and weights."""
        if "input_ids" not in example:
            raise ValueError(f"it has {', '.join(example) or 'no keys'}, but not the token ids, input_ids")
        tokens = len(example["input_ids"])
        for key in ("labels", "weights"):
            if example.get(key) is not None and len(example[key]) != tokens:
                raise ValueError(f"it has {tokens} input_ids, but {len(example[key])} {key}; write one for each")
        if not tokens:
            raise ValueError("its input_ids are empty; leave it out")
        return tokens

    def collate(self, examples: Sequence[Example], length: int) -> TokenBatch:
        """The rows of examples that have at most `length` tokens; every tensor is (examples, length)."""
        shape = len(examples), length
        tokens, targets = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        weights, positions, documents = (
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
        )
        for row, example in enumerate(examples):
            count = self.count(example)
            begin = length - count if self.side == "left" else 0
            own, rest = slice(begin, begin + count), slice(0, begin) if begin else slice(count, length)
            tokens[row, own] = _ids(example["input_ids"])
            targets[row, begin : begin + count - 1], weights[row, begin : begin + count - 1] = _learned(example)
            for part in (own, rest):
                positions[row, part] = np.arange(part.stop - part.start)
            documents[row, max(own.start, rest.start) :] = 1
            if count == length:
                documents[row] = 0
        padding = tokens.size - sum(self.count(example) for example in examples)
        return TokenBatch.from_numpy(
            tokens=tokens,
            targets=targets,
            positions=positions,
            document_ids=documents,
            weights=weights,
            padding=padding,
        )


def _learned(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The targets of all tokens but the last, and their weights."""
    following = _ids(example["input_ids"])[1:]
    weights = np.ones(len(following), np.float32)
    if example.get("weights") is not None:
        weights = np.asarray(example["weights"], np.float32)[1:]
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("one of its weights is negative or no finite number")
    if example.get("labels") is not None:
        labels = _ids(example["labels"])[1:]
        if ((labels != IGNORE_INDEX) & (labels != following)).any():
            raise ValueError(f"one of its labels is neither its token, unshifted, nor {IGNORE_INDEX}")
        following, weights = labels, np.where(labels == IGNORE_INDEX, np.float32(0), weights)
    return following, weights


def _ids(values: Any) -> np.ndarray:
    ids = np.asarray(values)
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
        raise ValueError(f"its ids are {ids.dtype} of shape {ids.shape} and not a sequence of integers")
    return ids.astype(np.int64)
