"""Checks once, at the start of a run, that ranks of one data-parallel group see the same rows."""

from hashlib import blake2b
from typing import NoReturn

from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError


def check_consistency(world: Group, replica: int, rows: int, batch: Batch) -> None:
    """
    Raise UserError on every rank if two ranks of a data-parallel index have different batches, or any two ranks
    different numbers of rows. It is a collective of all ranks.
    """
    seen = world.gather_json([replica, rows, _fingerprint(batch)])
    first_of: dict[int, int] = {}
    for rank, (number, count, fingerprint) in enumerate(seen):
        if count != seen[0][1]:
            _refuse(0, rank, f"have {seen[0][1]} and {count} training rows")
        first = first_of.setdefault(number, rank)
        if fingerprint != seen[first][2]:
            _refuse(first, rank, f"have the same data-parallel index {number}, and see different rows")


def _refuse(first: int, second: int, what: str) -> NoReturn:
    hint = "give every rank the same corpus, tokenizer and seed"
    raise UserError(f"data: ranks {first} and {second} {what}; {hint}")


def _fingerprint(batch: Batch) -> str:
    digest = blake2b(digest_size=16)
    for tensor in batch.tensors():
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
