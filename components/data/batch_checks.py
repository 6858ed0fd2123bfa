"""Row digests, and checks for a run's first batch."""

import json
from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Any, NoReturn

from drawloom import UserError
from drawloom.components.storage.tensor_source import view_bytes
from drawloom.ports import Batch, Group, PackedDataset


def compute_row_digests(batch: Batch) -> list[str]:
    """Return a digest for every row in a batch, over all tensors except replicated ones."""
    rows = batch.row_count
    tensors = [tensor for _, spec, tensor in batch.named_tensors() if spec != "replicated"]
    contents = [(view_bytes(tensor), tensor.nbytes // rows) for tensor in tensors if rows]
    joined = (b"".join(content[row * size :][:size] for content, size in contents) for row in range(rows))
    return [blake2b(content, digest_size=8).hexdigest() for content in joined]


def hash_first_rows(numbers: Sequence[int], first: Batch) -> str:
    """Return a digest for the order's first row numbers, and for the first row's content in a batch."""
    content = [[int(number) for number in numbers], compute_row_digests(first)]
    return sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def check_batch(rows: PackedDataset, batch: Any) -> None:
    """Raise UserError if a batch has another class than declared, or its tensors do not fit together."""
    declared = rows.batch_type or Batch
    if not isinstance(batch, declared):
        actual = type(batch).__name__
        raise UserError(
            f"rows: {type(rows).__name__} declares the batch class {declared.__name__}, but returned a {actual}; "
            "correct one of the two",
            2,
        )
    try:
        batch.check()
    except ValueError as error:
        text = f"rows: {type(rows).__name__} makes a batch whose leaves do not fit together"
        raise UserError(f"{text}: {error}", 2) from error


def check_ranks_have_consistent_batches(world: Group, data_parallel_index: int, rows: int, batch: Batch) -> None:
    """
    Raise UserError on every rank if ranks with one data-parallel index have different batches, or if any ranks have
    different row counts. Collective over all ranks.
    """
    answers = world.gather_json([data_parallel_index, rows, _hash_batch(batch)])
    first_ranks: dict[int, int] = {}
    for rank, (index, row_count, fingerprint) in enumerate(answers):
        if row_count != answers[0][1]:
            _raise_rank_difference(0, rank, f"have {answers[0][1]} and {row_count} training rows")
        first = first_ranks.setdefault(index, rank)
        if fingerprint != answers[first][2]:
            _raise_rank_difference(first, rank, f"have the same data-parallel index {index}, and see different rows")


def _raise_rank_difference(first_rank: int, second_rank: int, difference: str) -> NoReturn:
    """Raise UserError for a difference between two ranks."""
    hint = "give every rank the same corpus, tokenizer and seed"
    raise UserError(f"data: ranks {first_rank} and {second_rank} {difference}; {hint}")


def _hash_batch(batch: Batch) -> str:
    """Hash the shapes and bytes in a batch."""
    digest = blake2b(digest_size=16)
    for tensor in batch.tensors():
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()
