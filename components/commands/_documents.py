"""Inference over documents, several at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from drawloom import UserError
from drawloom.ports import TokenContext

T = TypeVar("T")
R = TypeVar("R")


def infer_documents(
    documents: Iterable[T], size: int, infer: Callable[[Sequence[T]], Iterable[R] | None]
) -> Iterator[tuple[T, R]]:
    """
    Yield every document with its result; `infer` returns the results for at most `size` documents.

    Raises UserError if `infer` returns None, as on ranks without the last stage.
    """
    remaining = iter(documents)
    while batch := [*islice(remaining, size)]:
        if (results := infer(batch)) is None:
            raise UserError("the last pipeline stage is on another rank; start one process, with mesh.pipeline=1", 2)
        yield from zip(batch, results, strict=True)


def pad_documents(documents: Sequence[Tensor | Sequence[int]]) -> tuple[Tensor, TokenContext]:
    """Return documents as rows, int64 (documents, length), with their context; padding is a separate document."""
    lengths = torch.tensor([len(ids) for ids in documents])
    tokens = torch.zeros(len(documents), max(1, int(lengths.max())), dtype=torch.int64)
    for row, ids in zip(tokens, documents, strict=True):
        row[: len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
    positions = torch.arange(tokens.shape[1]).repeat(len(documents), 1)
    return tokens, TokenContext(positions, (positions >= lengths[:, None]).long())
