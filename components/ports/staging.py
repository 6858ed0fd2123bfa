"""Port for staging: state copies that stay unchanged while training continues."""

from concurrent.futures import Future
from typing import Any, Protocol

from drawloom.graph import port


@port
class Stager(Protocol):
    """
    Copier for states: the copy is written to disk while the state changes.

    It also implements `torch.distributed.checkpoint.staging.AsyncStager`, for torch's `async_save`.
    """

    @property
    def makes_copies(self) -> bool:
        """Whether `stage` returns a copy; otherwise the state must not change until it is written."""
        ...

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether torch's `async_save` calls `synchronize_staging`."""
        ...

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """
        Return a copy of the state dict, or its future. The copy's memory is not reused while any copied tensor is
        alive.

        Raises TypeError, with the path, for a value that can't be copied.
        """
        ...

    def synchronize_staging(self) -> None:
        """Wait until the state may change. Raises a failed copy's error."""
        ...

    def close(self) -> None:
        """Free the copies' memory."""
        ...
