"""
Reads rows of tokens in a random order by one of several loaders, and prints the rows per second.

python loading.py WAY TOKENS FOLDER WORKERS: run in the environment of the loader's library; TOKENS is a file of uint16.
Batches are int64 (BATCH, LENGTH + 1) in memory. A way first makes the files that its library reads, which is not timed;
neither are the first batches.
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
    """Rows of a memory-mapped file."""

    def __init__(self, tokens: Path) -> None:
        self.ids = np.memmap(tokens, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.ids) - 1) // LENGTH

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.ids[row * LENGTH : (row + 1) * LENGTH + 1].astype(np.int64))


def drawloom(tokens: Path, _folder: Path, workers: int) -> Iterable[Any]:
    """`data.loader` with rows of concatenated documents, from the store that the file is of."""
    from drawloom.components.data.loader import Loader
    from drawloom.components.data.order.shuffled import Shuffled
    from drawloom.components.data.packing.concatenated import Concatenated
    from drawloom.components.data.tokenized import Tokenized
    from drawloom.components.distributed.process_group import SingleProcess
    from drawloom.components.ports.distributed import Mesh
    from drawloom.components.ports.run import RunInfo
    from drawloom.components.run.batch import GlobalBatch
    from drawloom.graph.testing import fake

    corpus = Tokenized(path=tokens.parent, validation_fraction=0.0)
    corpus.open()
    job, mesh = fake(RunInfo, seed=1), fake(Mesh, size=1, world=SingleProcess())
    rows = Concatenated(tokens=corpus, job=job, length=LENGTH)
    rows.open()
    batching = GlobalBatch(mesh=mesh, global_size=BATCH, micro_size=BATCH)
    loader = Loader(rows=rows, order=Shuffled(job=job), batching=batching, mesh=mesh, workers=workers)
    loader.open()
    return (batch for _ in count() for batch in loader.next_step())


def torch_loader(tokens: Path, _folder: Path, workers: int) -> Iterable[Any]:
    """torch's DataLoader over a memory-mapped file."""
    return torch.utils.data.DataLoader(Rows(tokens), BATCH, shuffle=True, num_workers=workers)


def litdata(tokens: Path, folder: Path, workers: int) -> Iterable[Any]:
    """`StreamingDataset` with the `TokensLoader`, of chunks that `optimize` has made."""
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
    """mosaicml-streaming's `StreamingDataset`, of MDS shards with a row in each sample."""
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


def measured(batches: Iterable[Any]) -> float:
    """Rows per second after the first batches."""
    endless = iter(batches)
    assert len(list(islice(endless, WARM))) == WARM
    start = time.perf_counter()
    seen = sum(1 for _ in islice(endless, ROWS // BATCH))
    assert seen == ROWS // BATCH, f"only {seen} batches"
    return ROWS / (time.perf_counter() - start)


if __name__ == "__main__":
    print("rows", measured(WAYS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
