"""Whether ranks that must see the same rows do: asked once, at the start of a run."""

from hashlib import blake2b
from typing import NoReturn

import attrs

from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError


def check_agreement(world: Group, replica: int, rows: int, batch: Batch) -> None:
    """
    A UserError on every rank if two ranks of a replica hold different batches, or any two ranks another number of rows.

    Every rank of the world must call it, for it gathers.
    """
    seen = world.gather_json([replica, rows, _fingerprint(batch)])
    first_of: dict[int, int] = {}
    for rank, (number, count, fingerprint) in enumerate(seen):
        if count != seen[0][1]:
            _refuse(0, rank, f"have {seen[0][1]} and {count} rows to learn from")
        first = first_of.setdefault(number, rank)
        if fingerprint != seen[first][2]:
            _refuse(first, rank, f"share replica {number}, and see different rows")


def _refuse(first: int, second: int, what: str) -> NoReturn:
    hint = "give every rank the same corpus, tokenizer and seed"
    raise UserError(f"data: ranks {first} and {second} {what}; {hint}")


def _fingerprint(batch: Batch) -> str:
    digest = blake2b(digest_size=16)
    for tensor in attrs.astuple(batch, recurse=False):
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
