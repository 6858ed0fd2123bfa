"""Detects on a CPU every read of a tensor's value, because on a GPU the host would wait for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.nonzero.default}


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which `.item()`, `.tolist()`, `bool(tensor)` and shapes that depend on values are errors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise AssertionError(f"the host reads a value of a tensor: {func}")
        return func(*args, **(kwargs or {}))
