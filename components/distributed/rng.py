"""Randomness by purpose: numbers that follow from a seed and some words, and from nothing that ran before."""

import hashlib
import json

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A number below 2^63 that follows from the seed and the purpose, the same on every machine and for ever."""
    text = json.dumps([seed, *purpose], ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """
    A generator on the CPU of its own for this purpose: (seed, "dropout", step, layer), say.

    torch keeps 32 bits of a seed, so two purposes meet by chance once in 4 billion.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
