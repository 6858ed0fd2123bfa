"""
Data at scale: the row index for many documents, every packing's fill rate, and reads from a token store.

Document lengths are log-normal with a mean near 900; rows have 4096 tokens. Seconds are CPU time on one core.
`DOCUMENTS=1e7` takes a tenth of the time.
"""

import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.best_fit import BestFit
from drawloom.components.data.packing.concatenated import Concatenated
from drawloom.components.data.packing.first_fit import FirstFit
from drawloom.components.data.packing.padded import Padded
from drawloom.components.data.packing.pieces import RowIndex
from drawloom.components.data.store.store import (
    FORMAT,
    STORE,
    ShardWriter,
    Store,
    TokenShard,
    encode_index_with_digest,
    get_shard_stem,
)

LENGTH = 4096
BLOCK = 10**6
GOAL = "20 s and 4 GB for 10^8 documents, shuffled, by best fit"


def draw_lengths(count: int) -> np.ndarray:
    """Return random document lengths in tokens, int32 (count,)."""
    random = np.random.default_rng(0)
    lengths = np.empty(count, np.int32)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        lengths[start : start + size] = np.clip(random.lognormal(6.0, 1.26, size), 2, 10**6)
    return lengths


def print_packings(lengths: np.ndarray) -> None:
    """Print every packing's seconds and fill rate for shuffled documents."""
    order = Permutation(1, "documents", 0, len(lengths))
    nothing: Any = None
    for kind in (BestFit, FirstFit, Padded, Concatenated):
        rows = kind(tokens=nothing, job=nothing, length=LENGTH)
        start = time.process_time()
        report(kind.__name__, rows.build_row_index(lengths, order), time.process_time() - start)


def report(name: str, index: RowIndex, seconds: float) -> None:
    """Print one packing's line, with the process's peak memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rate = index.tokens / index.rows / LENGTH
    print(f"{name:<14} {seconds:6.1f} s  {index.rows:>12,} rows  {rate:.5f} filled  {peak:.2f} GB")


def read_store(count: int) -> None:
    """Print how long shuffled reads from a store take, first with verification and then with all blocks verified."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, random = Path(temporary), np.random.default_rng(0)
        with ShardWriter(folder, 0, np.dtype("<u2")) as writer:
            for length in draw_lengths(count):
                writer.append_document(random.integers(2**16, size=length, dtype=np.uint16), "drawn", 0)
        shard = TokenShard.open_from_json(get_shard_stem(folder, 0), np.dtype("<u2"))
        index = {
            "format": FORMAT,
            "dtype": "uint16",
            "vocab_size": 2**16,
            "eos_id": 0,
            "prefix_ids": [],
        }
        index |= {"tokenizer": "", "fingerprint": "", "shards": [[shard.documents, shard.tokens, shard.digest]]}
        (folder / STORE).write_bytes(encode_index_with_digest(index))
        start = time.perf_counter()
        store = Store.open(folder)
        opened = time.perf_counter() - start
        first, again = (read_shuffled(store, random) for _ in range(2))
        times = f"opened in {opened:.4f} s, read in {first:.2f} s with verification and {again:.2f} s again"
        print(f"a store of {store.token_count:,} tokens: {times}")


def read_shuffled(store: Store, random: np.random.Generator) -> float:
    """Return the seconds to read all documents and sum their ids."""
    start = time.perf_counter()
    for document in random.permutation(len(store.lengths)):
        store.read(int(document), 0, LENGTH).ids.sum()
    return time.perf_counter() - start


def main() -> None:
    """Print all tables."""
    count = int(float(os.environ.get("DOCUMENTS", "1e8")))
    lengths = draw_lengths(count)
    print(f"{count:,} documents, mean {lengths.mean():.0f} tokens; goal: {GOAL}")
    print_packings(lengths)
    read_store(10**5)
