"""
Data at scale: an index of rows for many documents, fill rates of each packing, and opening a large token store.

Lengths are log-normal, with a mean of about 900, in rows of 4096. Seconds are of one core's CPU time. `DOCUMENTS=1e7`
takes a tenth of the time.
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
from drawloom.components.data.packing.rows import RowIndex
from drawloom.components.data.store.store import Store
from support.stores import store_of

LENGTH = 4096
BLOCK = 10**6
GOAL = "20 s and 4 GB for 10^8 documents, shuffled, by best fit"


def lengths_of(count: int) -> np.ndarray:
    """Tokens of documents, int32 (count,)."""
    random = np.random.default_rng(0)
    lengths = np.empty(count, np.int32)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        lengths[start : start + size] = np.clip(random.lognormal(6.0, 1.26, size), 2, 10**6)
    return lengths


def packings(lengths: np.ndarray) -> None:
    """Print seconds and fill rate of each packing, with the order of documents."""
    order = Permutation(1, "documents", 0, len(lengths))
    nothing: Any = None
    for kind in (BestFit, FirstFit, Padded, Concatenated):
        rows = kind(tokens=nothing, job=nothing, length=LENGTH)
        start = time.process_time()
        report(kind.__name__, rows.index_of(lengths, order), time.process_time() - start)


def report(name: str, index: RowIndex, seconds: float) -> None:
    """Print a line; the peak memory is that of the process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rate = index.tokens / index.rows / LENGTH
    print(f"{name:<14} {seconds:6.1f} s  {index.rows:>12,} rows  {rate:.5f} filled  {peak:.2f} GB")


def open_large_store(tokens: int) -> None:
    """Print the time of opening a store, of which the disk holds almost nothing."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        store_of(folder, [["ab"]])
        path = folder / "store.json"
        path.write_text(path.read_text().replace('"shards": [[1, 3]]', f'"shards": [[1, {tokens}]]'))
        os.truncate(folder / "00000.tokens", 2 * tokens)
        with (folder / "00000.documents").open("r+b") as file:
            file.write(tokens.to_bytes(8, "little"))
        start = time.perf_counter()
        store = Store.open(folder)
        ids = store.read(0, tokens - 5, tokens).ids
        seconds = time.perf_counter() - start
        print(f"a store of {tokens:,} tokens: opened, and its last {len(ids)} ids read, in {seconds:.4f} s")


def main() -> None:
    """Print all."""
    count = int(float(os.environ.get("DOCUMENTS", "1e8")))
    lengths = lengths_of(count)
    print(f"{count:,} documents, mean {lengths.mean():.0f} tokens; goal: {GOAL}")
    packings(lengths)
    open_large_store(10**9)
