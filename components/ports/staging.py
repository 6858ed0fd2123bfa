"""Port of staging: copies of a state that do not change while training continues."""

from concurrent.futures import Future
from typing import Any, Protocol

from drawloom.graph import port


@port
class Stager(Protocol):
    """
    Copies a state, so that the copy is written while the state changes.

    It also implements `torch.distributed.checkpoint.staging.AsyncStager`, for torch's `async_save`.
    """

    @property
    def copies(self) -> bool:
        """Whether `stage` returns a copy; if not, the state must not change until it is written."""
        ...

    @property
    def should_synchronize_after_execute(self) -> bool:
        """For torch: whether it calls `synchronize_staging` itself."""
        ...

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """
        A copy of the state dict, or its future. Its memory is not reused while any tensor of the copy is alive.

        Raises TypeError, with the path, for a value that can't be copied.
        """
        ...

    def synchronize_staging(self) -> None:
        """Wait until the state may change; raises the error of a failed copy."""
        ...

    def close(self) -> None:
        """Free the memory of copies."""
        ...
