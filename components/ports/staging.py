"""Copies of a state that stay as they are while training goes on."""

from concurrent.futures import Future
from typing import Any, Protocol

from drawloom.graph import port


@port
class Stager(Protocol):
    """
    Makes the copy of a state that is written, while the state itself is free to change.

    It also satisfies `torch.distributed.checkpoint.staging.AsyncStager`, and so serves `async_save` of torch.
    """

    @property
    def copies(self) -> bool:
        """Whether what is staged is a copy; if not, the state must not change until it is written."""
        ...

    @property
    def should_synchronize_after_execute(self) -> bool:
        """For torch: whether it calls `synchronize_staging` itself."""
        ...

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """
        The copy, or what will be the copy. Its memory is used for nothing else as long as anybody holds a part of it.

        Raises TypeError, with the path, for what can't be copied.
        """
        ...

    def synchronize_staging(self) -> None:
        """Return when the state may change; raises what went wrong with the copy."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...
