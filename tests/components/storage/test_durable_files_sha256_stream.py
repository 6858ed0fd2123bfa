"""SHA-256 of bytes on their way."""

import hashlib
import threading

import hypothesis
from hypothesis import strategies as st

from drawloom.components.storage.durable_files import (
    BLOCK,
    LARGE,
    FileDigest,
    Sha256Stream,
    count_hash_blocks,
    hash_block,
)

SIZES = st.lists(st.sampled_from([0, 1, 100, LARGE - 1, LARGE, 3 * LARGE, BLOCK - 1, BLOCK, 2 * BLOCK]), max_size=6)


@hypothesis.given(SIZES)
@hypothesis.settings(max_examples=20)
def test_the_hashes_are_of_all_pieces_in_order(sizes: list[int]) -> None:
    """The hashes of blocks do not depend on how the bytes are divided into pieces, and finishing twice changes none."""
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream, whole = Sha256Stream(), b"".join(pieces)
    for piece in pieces:
        stream.update(memoryview(piece))
    blocks = [whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK)] or [b""]
    content = stream.finish()
    assert content == stream.finish() == FileDigest(len(whole), [hashlib.sha256(block).hexdigest() for block in blocks])
    assert len(content.blocks) == count_hash_blocks(len(whole))


def test_the_digest_of_a_file_depends_on_each_block() -> None:
    """Two contents have one digest only if all of their blocks are alike, in their order."""
    one, other = hash_block(b"one"), hash_block(b"other")
    contents = [FileDigest(5, blocks) for blocks in ([one], [other], [one, other], [other, one])]
    assert len({content.digest for content in contents}) == 4
    assert contents[0].digest == FileDigest(5, (one,)).digest


def test_finish_leaves_no_thread_behind() -> None:
    """For small pieces none is started."""
    before, stream = threading.active_count(), Sha256Stream()
    stream.update(memoryview(b"small"))
    assert threading.active_count() == before
    stream.update(memoryview(bytes(LARGE)))
    assert threading.active_count() == before + 1
    stream.finish()
    assert threading.active_count() == before
