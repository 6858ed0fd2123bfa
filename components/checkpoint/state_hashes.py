"""State hashes of every tensor after each step, to find the first step and tensor in which two runs differ."""

import hashlib
import json
import os
from pathlib import Path

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, Stateful, Step
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import make_folder, open_to_append
from drawloom.components.storage.state_tree import entries, pack
from drawloom.components.storage.tensor_source import bytes_of
from drawloom.graph import Every, component

SHORT = 16  # hexadecimal digits of a SHA-256: enough to distinguish tensors


@component(reads=("weights",), impact="safe")
class StateHashes:
    """
    Writes `digests/rank-N.jsonl` in the run folder: an object for each step, with `step` and `digests`.

    There is a digest of each tensor, and one of all other values of each node. The phase reads the whole state at every
    step; it is for comparing runs, and belongs last in a step.
    """

    folder: RunFolder
    mesh: Mesh
    states: Every[Stateful]

    _path: Path | None = attrs.field(init=False, default=None)
    _newest: int = attrs.field(init=False, default=0)

    def run_phase(self, step: Step) -> None:
        """Append the hashes of a step; later lines, of a process that was killed or went back, are removed."""
        if self._path is None or step.index <= self._newest:
            self._path = self._begin(step.index)
        self._newest = step.index
        row = {
            "step": step.index,
            "digests": state_hashes({name: node.state_dict() for name, node in self.states.items()}),
        }
        with os.fdopen(open_to_append(self._path), "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _begin(self, step: int) -> Path:
        path = make_folder(self.folder.folder / "digests") / f"rank-{self.mesh.world.rank}.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["step"] < step]
        replace_file(path, "".join(line + "\n" for line in kept).encode())
        return path


def state_hashes(states: dict[str, dict[str, object]]) -> dict[str, str]:
    """The digest of each tensor by its path, and of a node's other values by its name."""
    tree, tensors = pack(states)
    found = {name: _digest(bytes_of(tensor)) for name, tensor in tensors.items()}
    return found | {node: _digest(json.dumps(part).encode()) for node, part in entries(tree).items()}


def read_lines(path: Path) -> list[str]:
    """The complete lines of a file; none if it is missing."""
    if not path.exists():
        return []
    return [
        line.removesuffix("\n") for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _digest(data: memoryview | bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:SHORT]
