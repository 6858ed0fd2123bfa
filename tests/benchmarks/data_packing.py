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

import numpy as np
import torch

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.best_fit import best_fit
from drawloom.components.data.packing.concatenated import Stream
from drawloom.components.data.packing.first_fit import first_fit
from drawloom.components.data.packing.groups import group_documents
from drawloom.components.data.packing.padded import one_each
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


def packings(lengths: np.ndarray, order: np.ndarray) -> None:
    """Print seconds and fill rate of each packing."""
    for name, group in (("best_fit", best_fit), ("first_fit", first_fit), ("padded", one_each)):
        start = time.process_time()
        report(name, group_documents(lengths, order, LENGTH, group), time.process_time() - start)
    start = time.process_time()
    ends = np.cumsum(lengths[order], dtype=np.int64)
    report("concatenated", Stream(torch.from_numpy(order), torch.from_numpy(ends), LENGTH), time.process_time() - start)


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
        ids = store.tokens(0, tokens - 5, tokens)
        seconds = time.perf_counter() - start
        print(f"a store of {tokens:,} tokens: opened, and its last {len(ids)} ids read, in {seconds:.4f} s")


def main() -> None:
    """Print all."""
    count = int(float(os.environ.get("DOCUMENTS", "1e8")))
    lengths = lengths_of(count)
    start = time.process_time()
    order = Permutation(1, "documents", 0, count).all()
    print(f"{count:,} documents, mean {lengths.mean():.0f} tokens; goal: {GOAL}")
    print(f"{'order':<14} {time.process_time() - start:6.1f} s")
    packings(lengths, order)
    open_large_store(10**9)
