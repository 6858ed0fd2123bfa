"""
Whether torch gives the same bits each time, on a GPU too; all of it is kept by the process.

cuBLAS reads CUBLAS_WORKSPACE_CONFIG when the first product is made on a device, and torch looks for it at each product
that is to be the same again. So it is set before a run makes its first: whatever opens before moves and fills tensors,
and multiplies none. A process that has multiplied before, in a notebook, keeps the workspaces that it has, which torch
gives to each stream by itself, so that products don't depend on what else the device is doing.
"""

import os

import attrs
import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS is deterministic; the first is the faster one."""


@attrs.frozen
class Determinism:
    """What torch and the environment say of it."""

    algorithms: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    workspace: str | None

    @classmethod
    def now(cls) -> "Determinism":
        """As it is."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(WORKSPACE),
        )

    @classmethod
    def full(cls) -> "Determinism":
        """Operations that can't give the same bits raise; a workspace that somebody chose stays, if it is fixed."""
        chosen = os.environ.get(WORKSPACE)
        return cls(True, False, True, False, chosen if chosen in FIXED else FIXED[0])

    def apply(self) -> None:
        """Make it so."""
        # Where code is compiled, this also keeps Inductor from choosing kernels by how fast they happen to be.
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = self.workspace
