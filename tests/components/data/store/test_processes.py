"""Processes for tokenizing."""

from pathlib import Path

import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store import build
from drawloom.components.data.store.build import create_and_lock_folder
from drawloom.components.data.store.tokenizing import Progress
from drawloom.graph import UserError
from support.stores import Deadly, Texts


def test_a_killed_process_is_an_error(tmp_path: Path) -> None:
    """A process killed for lack of memory, for example, ends the others, and the error has its signal."""
    parts: dict[int, Part] = {0: Texts(("a",)), 1: Deadly(), 2: Texts(("b",))}
    ends = pytest.raises(UserError, match=r"was killed by SIGKILL; check for a lack of memory")
    with create_and_lock_folder(tmp_path, print) as lock, ends:
        build.tokenize_parts_into_shards(tmp_path, parts, Bytes(), 2, Progress({0: 1, 1: 1, 2: 1}, 0, print, 1e9), lock)
