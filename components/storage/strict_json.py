"""Strict JSON: parsing of untrusted files at a bounded cost and without ambiguity, and a canonical form."""

import hashlib
import json
from collections import Counter
from typing import Any


def parse(text: bytes, *, most: int) -> Any:
    """
    The value of a JSON text.

    Raises ValueError, with the reason, for invalid JSON, for names that an object has twice, for NaN and infinities,
    and for texts with more than `most` of the characters that begin or separate values: each value may take some
    hundred bytes of memory.
    """
    if (parts := sum(text.count(sign) for sign in b"{[,:")) > most:
        raise ValueError(f"it has {parts} parts, and more than {most} are not read")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def dumps(value: Any) -> bytes:
    """A value in canonical form: sorted keys, no spaces; ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()


def checksum(value: Any) -> str:
    """The SHA-256 of the canonical form in hexadecimal; formatting and the order of keys do not matter."""
    return hashlib.sha256(dumps(value)).hexdigest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {next(name for name in made if counts[name] > 1)!r:.99} more than once")
    return made


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")
