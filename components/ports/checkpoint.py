"""Ports for checkpoints: stateful nodes, the checkpointer, copies of states, and nodes that take part in saving."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, runtime_checkable

from drawloom import port
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice

NodeState = dict[str, Any]
"""A nested dict; leaves are tensors, numbers, strings, booleans, None, or lists of such values."""


@port(named=True)
class Stateful(Protocol):
    """
    A node with state that checkpoints save under the node's name.

    All ranks have the same state, unless the node declares separate states by rank (`LocalState`) or a state sharded
    over ranks (`SlicedState`).

    State tensors are read until the next step calls `Step.apply_update_unless_skipped`; a node that changes a tensor
    earlier returns a copy.
    """

    def state_dict(self) -> NodeState:
        """Return the state needed for a bit-exact resume."""

    def load_state_dict(self, state: NodeState) -> None:
        """Load a saved state. Raises KeyError or ValueError if the state does not fit the node."""


@runtime_checkable
class LocalState(Protocol):
    """A stateful node with separate states by rank."""

    state_is_local: ClassVar[bool]


@runtime_checkable
class SlicedState(Protocol):
    """
    A stateful node with entries sharded over ranks.

    Checkpoints can be loaded on a different number of ranks with different slices. A tensor is a slice if it has as
    many dimensions as its entry's slice; other tensors are whole.
    """

    def state_slices(self) -> Mapping[str, TensorSlice | None]:
        """Return this rank's slices by entry name; None for a whole entry."""


@port
class GrowingState(Stateful, Protocol):
    """A stateful node whose first step adds tensors to its state, such as an optimizer."""

    def forecast_state_after_first_step(self) -> NodeState:
        """
        Return the state as it will be after the first step, with all tensors' shapes and dtypes.

        Tensors may be on the meta device: only their bytes are counted, by the check of free disk space.
        """


@port
@runtime_checkable
class Durable(Protocol):
    """Writer for logs that must be on disk before a later checkpoint is committed."""

    def flush(self) -> None:
        """
        Wait until everything written so far is on disk, or passed to a dependency: dependencies are flushed later. May
        be called from any thread.
        """


@port
class Restorer(Protocol):
    """Checkpointer: the component that saves and restores the run's checkpoints."""

    def restore(self) -> int:
        """Load the newest checkpoint into every stateful node and return its step, 0 if there is none."""

    def save(self, step: Step) -> bool:
        """Save a checkpoint after a step, unless it is already saved; return False if no step is ever saved."""

    def wait_until_staged(self) -> None:
        """
        Wait until the state is copied, after which it may change.

        This is for the save in progress, and for `keep_in_memory_for_joiners`.
        """

    def keep_in_memory_for_joiners(self, step: Step) -> None:
        """
        Keep a copy in memory of the state after a step, if the run can continue there after a rank is lost.

        Raises ReopenError on all ranks if processes wait to join the run. All ranks have ended the step.
        """

    def recorded_step_values(self) -> Iterable[tuple[int, Mapping[str, float | None]]]:
        """Return steps with some output numbers; None replaces a number that was not finite."""


@port
class AfterRestore(Protocol):
    """A node that acts after the run's state has been restored."""

    def after_restore(self, restored_step: int) -> None:
        """
        Act on every rank after states are restored: before the first step, and after going back to a checkpoint.

        `restored_step` is the checkpoint's step; 0 in a new run, which restores nothing.
        """


@port
class Stager(Protocol):
    """
    Copier for states: the copy is written to disk while the state changes.

    It also implements `torch.distributed.checkpoint.staging.AsyncStager`, for torch's `async_save`.
    """

    @property
    def makes_copies(self) -> bool:
        """Whether `stage` returns a copy; otherwise the state must not change until it is written."""

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether torch's `async_save` calls `synchronize_staging`."""

    def stage(self, state_dict: NodeState) -> NodeState | Future[NodeState]:
        """
        Return the state dict to write, or its future: a copy if `makes_copies`, whose memory is not reused while any
        copied tensor is alive, otherwise the state itself.

        Raises TypeError, with the path, for a value that can't be copied.
        """

    def synchronize_staging(self) -> None:
        """Wait until the state may change. Raises a failed copy's error."""

    def close(self) -> None:
        """Free the copies' memory."""
