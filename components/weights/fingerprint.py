"""A fingerprint of a folder of weights, to tell whether it is still the one that a run started from."""

import hashlib
from pathlib import Path

from drawloom.components.storage.regular_file import open_regular_file

WHOLE = 2**24
"""Bytes of a file that are hashed in full; of larger ones samples are, so that a fingerprint takes milliseconds."""

SAMPLES = 256
"""Samples of a large file, each of WHOLE / SAMPLES bytes, evenly spread, with its beginning and its end."""


def folder_fingerprint(folder: Path) -> str:
    """SHA-256 of the names, sizes and sampled bytes of a folder's safetensors files, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open_regular_file(path) as file:
            digest.update(f"{path.name} {file.size}\n".encode())
            for offset, size in _samples(file.size):
                digest.update(file.read(offset, size))
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Offset and size of each part of a file that is hashed."""
    if size <= WHOLE:
        return [(0, size)]
    part = WHOLE // SAMPLES
    return [(place * (size - part) // (SAMPLES - 1), part) for place in range(SAMPLES)]
