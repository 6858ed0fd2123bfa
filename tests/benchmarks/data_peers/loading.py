"""
Read rows of tokens in random order with one of several loaders, and print the rows per second.

python loading.py WAY TOKENS FOLDER WORKERS: run in the environment of the loader's library; TOKENS is a uint16 file.
Batches are int64 (BATCH, LENGTH + 1) in memory. Not timed are the conversion to the library's own file format and the
first batches.
"""

import sys
import time
from collections.abc import Callable, Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH, BATCH, ROWS, WARM = 2048, 8, 2400, 20


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Dataset of rows in a memory-mapped file."""

    def __init__(self, tokens: Path) -> None:
        self.ids = np.memmap(tokens, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.ids) - 1) // LENGTH

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.ids[row * LENGTH : (row + 1) * LENGTH + 1].astype(np.int64))


def drawloom(tokens: Path, _folder: Path, workers: int) -> Iterable[Any]:
    """Load concatenated documents with `data.loader`, from the store around the tokens file."""
    from drawloom.components.data.loader import Loader
    from drawloom.components.data.order.shuffled import Shuffled
    from drawloom.components.data.packing.concatenated import Concatenated
    from drawloom.components.data.tokenized import Tokenized
    from drawloom.components.distributed.single_process import SingleProcess
    from drawloom.components.ports.distributed import Mesh, PerDimension
    from drawloom.components.ports.run import RunInfo
    from drawloom.components.run.batch import GlobalBatch
    from drawloom.graph.testing import fake

    corpus = Tokenized(path=tokens.parent, validation_fraction=0.0)
    corpus.open()
    first = PerDimension.of_first_rank()
    job, mesh = fake(RunInfo, seed=1), fake(Mesh, world=SingleProcess(), sizes=PerDimension(), indices=first)
    rows = Concatenated(tokens=corpus, job=job, length=LENGTH)
    rows.open()
    batching = GlobalBatch(mesh=mesh, global_size=BATCH, micro_size=BATCH)
    loader = Loader(rows=rows, order=Shuffled(job=job), batching=batching, mesh=mesh, workers=workers)
    loader.open()
    return (batch for _ in count() for batch in loader.next_step())


def torch_loader(tokens: Path, _folder: Path, workers: int) -> Iterable[Any]:
    """Load rows of a memory-mapped file with torch's DataLoader."""
    return torch.utils.data.DataLoader(Rows(tokens), BATCH, shuffle=True, num_workers=workers)


def litdata(tokens: Path, folder: Path, workers: int) -> Iterable[Any]:
    """Load chunks written by `optimize` with `StreamingDataset` and `TokensLoader`."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    rows = Rows(tokens)
    blocks = TokensLoader(block_size=LENGTH + 1)
    if not folder.exists():
        optimize(
            fn=rows.__getitem__,
            inputs=list(range(len(rows))),
            output_dir=str(folder),
            num_workers=1,
            chunk_size=(LENGTH + 1) * 1000,
            item_loader=blocks,
        )
    data = StreamingDataset(str(folder), item_loader=blocks, shuffle=True, drop_last=False)
    loader: Iterable[Any] = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
    return loader


def streaming(tokens: Path, folder: Path, workers: int) -> Iterable[Any]:
    """Load MDS shards with one row per sample with mosaicml-streaming's `StreamingDataset`."""
    from streaming import MDSWriter, StreamingDataset

    rows = Rows(tokens)
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:int64:{LENGTH + 1}"}) as out:
            for row in range(len(rows)):
                out.write({"tokens": rows[row].numpy()})
    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return torch.utils.data.DataLoader(data, BATCH, num_workers=workers)


WAYS: dict[str, Callable[[Path, Path, int], Iterable[Any]]] = {
    "drawloom": drawloom,
    "torch": torch_loader,
    "litdata": litdata,
    "streaming": streaming,
}


def measure_rate(batches: Iterable[Any]) -> float:
    """Return the rows per second after the warm-up batches."""
    endless = iter(batches)
    assert len(list(islice(endless, WARM))) == WARM
    start = time.perf_counter()
    seen = sum(1 for _ in islice(endless, ROWS // BATCH))
    assert seen == ROWS // BATCH, f"only {seen} batches"
    return ROWS / (time.perf_counter() - start)


if __name__ == "__main__":
    print("rows", measure_rate(WAYS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
