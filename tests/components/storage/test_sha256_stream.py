"""SHA-256 of bytes on their way."""

import hashlib
import threading

import hypothesis
from hypothesis import strategies as st

from drawloom.components.storage.sha256_stream import LARGE, Content, Sha256Stream

SIZES = st.lists(st.sampled_from([0, 1, 100, LARGE - 1, LARGE, 3 * LARGE]), max_size=8)


@hypothesis.given(SIZES)
@hypothesis.settings(max_examples=30)
def test_the_hash_is_of_all_pieces_in_order(sizes: list[int]) -> None:
    """The hash does not depend on how the bytes are divided into pieces."""
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream, whole = Sha256Stream(), b"".join(pieces)
    for piece in pieces:
        stream.update(memoryview(piece))
    assert stream.finish() == Content(len(whole), hashlib.sha256(whole).hexdigest())


def test_finish_leaves_no_thread_behind() -> None:
    """For small pieces none is started."""
    before, stream = threading.active_count(), Sha256Stream()
    stream.update(memoryview(b"small"))
    assert threading.active_count() == before
    stream.update(memoryview(bytes(LARGE)))
    assert threading.active_count() == before + 1
    stream.finish()
    assert threading.active_count() == before
