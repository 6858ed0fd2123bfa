"""Hashes of a step's values, gradients and states after every phase, to find the first difference between two runs."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from drawloom import Every, component, internal
from drawloom.components.checkpoint.state_hashes import FOLDER, hash_states
from drawloom.components.state.trees import list_labelled_children
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.components.storage.step_log import AppendedFile, encode_row
from drawloom.components.storage.tensor_source import hash_tensor_bytes
from drawloom.ports import METRIC_TOTALS, Event, EventKind, Mesh, Parameters, RunFolder, Stateful, Step, Tracker

INITIAL = "the start of the step"
"""Phase of the first line: the values before any phase."""


def get_hashes_file_name(rank: int | str) -> str:
    """Return the file of a rank, or a pattern for all with "*", in the folder of hashes."""
    return f"phases-{rank}.jsonl"


@component(impact="safe")
class PhaseHashes:
    """
    Writer for `digests/phases-N.jsonl` in the run folder: an object per phase, with `step`, `phase` and `digests`.

    It hashes the tensors of the step, the gradients and the state of all nodes after every phase, and is slow: it is
    for `drawloom why`, which adds it to the runs that it repeats. List it under `trainer.listeners` to record a run.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "phase_ended")

    folder: RunFolder
    mesh: Mesh
    parameters: Parameters
    states: Every[Stateful]
    trackers: Every[Tracker]

    _file: AppendedFile | None = internal(None)

    def on_event(self, event: Event) -> None:
        """Append the hashes after a phase, and before the first phase of this process."""
        if event.step is None or (event.kind == "step_started" and self._file is not None):
            return
        if self._file is None:
            self._file = AppendedFile.open(
                create_folder_unless_link(self.folder.folder / FOLDER) / get_hashes_file_name(self.mesh.world.rank)
            )
        digests = dict(self._iterate_step_and_state_digests(event.step))
        line = encode_row({"step": event.step.index, "phase": event.phase or INITIAL, "digests": digests})
        while line:
            line = line[self._file.append_what_fits(line) :]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _iterate_step_and_state_digests(self, step: Step) -> Iterator[tuple[str, str]]:
        """Yield (path, digest) for the step's tensors, the gradients, and all nodes' states but trackers'."""
        for name in step.state:
            if name == METRIC_TOTALS:  # with measured times
                continue
            yield from (
                (path, hash_tensor_bytes(tensor))
                for path, tensor in _iterate_tensors_with_paths(step.state[name], name)
            )
        for name, parameter in self.parameters.named_parameters():
            if parameter.grad is not None:
                yield f"gradient of {name}", hash_tensor_bytes(parameter.grad)
        # a tracker keeps a series per run
        states = {name: node.state_dict() for name, node in self.states.items() if name not in self.trackers}
        yield from hash_states(states).items()


def _iterate_tensors_with_paths(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a nested value, after its path, such as `batches[0].tokens`."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for access, child in list_labelled_children(value) or ():
        yield from _iterate_tensors_with_paths(child, f"{path}{access}")
