"""SHA-256 of bytes on their way."""

import hashlib
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from drawloom.components.storage.sha256_stream import LARGE, Sha256Stream

SIZES = st.lists(st.sampled_from([0, 1, 100, LARGE - 1, LARGE, 3 * LARGE]), max_size=8)


@hypothesis.given(SIZES)
@hypothesis.settings(max_examples=30)
def test_it_is_the_digest_of_all_pieces_in_order(sizes: list[int]) -> None:
    """Small and large pieces, mixed in any way."""
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    with Sha256Stream() as digest:
        for piece in pieces:
            digest.update(memoryview(piece))
        assert digest.hex() == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_no_thread_is_left_behind() -> None:
    """Not even by an error in the middle; for small pieces there never is one."""
    before = threading.active_count()
    with pytest.raises(KeyError), Sha256Stream() as digest:
        digest.update(memoryview(b"small"))
        assert threading.active_count() == before
        digest.update(memoryview(bytes(LARGE)))
        raise KeyError
    assert threading.active_count() == before
