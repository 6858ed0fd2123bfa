"""Results recorded with a pass."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from drawloom.components.ports.model import Head


@runtime_checkable
class RecordableFinish(Protocol):
    """
    `Finish` as a tree (`components/state/trees.py`): a recorded pass copies the tensors in it, and calls it.

    Its other values are equal in all passes over one token after the same cache.
    """

    is_recordable: ClassVar[bool]

    def __call__(self, hidden: Tensor, head: Head) -> Any:
        """Return a tree of tensors, without reading a tensor's value on the host."""
