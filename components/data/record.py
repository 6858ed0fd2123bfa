"""A record of the rows that each step has seen, which `drawloom data audit` compares with those that it should see."""

import json
import os
from hashlib import blake2b
from pathlib import Path

import attrs

from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Batching, RunFolder, Step
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import make_folder, open_to_append
from drawloom.graph import component

FOLDER = "rows"


@component(reads=("batches",), impact="safe")
class Record:
    """
    Writes `rows/rank-N.jsonl` in the run folder: an object for each step, with a digest of each row of this rank.

    The phase comes after the one that loads the step's data. A row's digest is of all its tensors, so the record is of
    what was trained on, and not of what was asked for.
    """

    folder: RunFolder
    mesh: Mesh
    batching: Batching

    _path: Path | None = attrs.field(init=False, default=None)
    _newest: int = attrs.field(init=False, default=0)

    def run_phase(self, step: Step) -> None:
        """Append the digests of a step; later lines, of a process that was killed or went back, are removed."""
        if self._path is None or step.index <= self._newest:
            self._path = self._begin(step.index)
        self._newest = step.index
        digests = [digest for batch in step.state["batches"] for digest in row_digests(batch)]
        row = {"step": step.index, "part": self.batching.dp_rank, "parts": self.batching.dp_size, "rows": digests}
        with os.fdopen(open_to_append(self._path), "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _begin(self, step: int) -> Path:
        folder = make_folder(self.folder.folder / FOLDER)
        path = folder / f"rank-{self.mesh.world.rank}.jsonl"
        if self.mesh.world.rank == 0:
            # also those of ranks that this run no longer has
            for each in folder.glob("rank-*.jsonl"):
                _truncate(each, step)
        self.mesh.world.gather_json(None)  # no rank appends before
        return path


def row_digests(batch: Batch) -> list[str]:
    """A digest of each row of a batch."""
    arrays = [tensor.contiguous().numpy() for tensor in batch.tensors()]
    return [_digest(b"".join(array[row].tobytes() for array in arrays)) for row in range(len(arrays[0]))]


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _truncate(path: Path, step: int) -> None:
    """Keep the complete lines of earlier steps."""
    lines = [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in lines if json.loads(line)["step"] < step]
    replace_file(path, "".join(kept).encode())
