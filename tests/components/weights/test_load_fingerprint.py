"""Fingerprints of folders of weights."""

from pathlib import Path

import pytest

from drawloom.components.weights import load
from drawloom.components.weights.load import folder_fingerprint


def write(folder: Path, **files: bytes) -> str:
    """Return the fingerprint of a folder with these files."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder_fingerprint(folder)


def test_any_byte_and_any_name_count(tmp_path: Path) -> None:
    """Copies have one fingerprint; another byte, size or name gives another."""
    first = write(tmp_path / "one", model=b"abc")
    assert first == write(tmp_path / "copy", model=b"abc")
    others = {
        write(tmp_path / str(n), **files)
        for n, files in enumerate(
            ({"model": b"abd"}, {"model": b"abcd"}, {"other": b"abc"}, {"model": b"abc", "other": b""})
        )
    }
    assert len(others | {first}) == 5


def test_large_files_are_sampled_over_their_whole_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A change in a long stretch anywhere, in the first and in the last byte changes the fingerprint, and few bytes are
    read.
    """
    monkeypatch.setattr(load, "WHOLE", 1024)
    content = bytes(100_000)
    fingerprints = {write(tmp_path / "one", model=content)}
    for start, end in ((0, 1), (40_000, 40_500), (99_999, 100_000)):
        fingerprints.add(write(tmp_path / "one", model=content[:start] + b"x" * (end - start) + content[end:]))
    assert len(fingerprints) == 4
    assert sum(size for _, size in load._choose_sample_offsets_and_sizes(100_000)) == 1024
