"""Hashes for every tensor after every step, to find the first difference between two runs."""

import json

from drawloom import Every, component
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.components.storage.state_tree import list_dict_entries, pack_state
from drawloom.components.storage.step_log import StepLog, StepLogWriter
from drawloom.components.storage.tensor_source import hash_bytes, hash_tensor_bytes
from drawloom.ports import Mesh, RunFolder, Stateful, Step

FOLDER = "digests"


@component(reads=("weights",), impact="safe")
class StateHashes(StepLogWriter):
    """
    Writer for `digests/rank-N.jsonl` in the run folder: an object per step, with `step` and `digests`.

    Every tensor has a digest; a node's other values have one digest together. The phase reads the whole state at
    every step; it is for comparing runs, and must be last in a step.
    """

    folder: RunFolder
    mesh: Mesh
    states: Every[Stateful]

    def run_phase(self, step: Step) -> None:
        """Append a step's hashes. Removes later lines from a process that was killed or went back."""
        hashes = hash_states({name: node.state_dict() for name, node in self.states.items()})
        self.append({"step": step.index, "digests": hashes})

    def open_before(self, step: int) -> StepLog:
        folder = create_folder_unless_link(self.folder.folder / FOLDER)
        return StepLog.open_before(folder / f"rank-{self.mesh.world.rank}.jsonl", step)


def hash_states(states: dict[str, dict[str, object]]) -> dict[str, str]:
    """Return tensor digests by path, and digests for the nodes' other values by node name."""
    tree, tensors = pack_state(states)
    tensor_hashes = {name: hash_tensor_bytes(tensor) for name, tensor in tensors.items()}
    return tensor_hashes | {
        node: hash_bytes(json.dumps(part).encode()) for node, part in list_dict_entries(tree).items()
    }
