"""
Deterministic algorithms: the process-wide settings of torch for bitwise reproducible results on a GPU.

cuBLAS reads CUBLAS_WORKSPACE_CONFIG at the first matmul on a device, and torch checks it at every deterministic matmul.
So it is set before the run's first matmul; nodes that open earlier only move and fill tensors. A process with earlier
matmuls, such as a notebook, keeps its workspaces; torch has one for each stream, so that results do not depend on what
other streams do.
"""

import os

import attrs
import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")
"""Workspace configurations with which cuBLAS is deterministic; the first is the faster one."""


@attrs.frozen
class Determinism:
    """The determinism settings of torch, cuDNN and cuBLAS."""

    algorithms: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    workspace: str | None

    @classmethod
    def now(cls) -> "Determinism":
        """The settings in force."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(WORKSPACE),
        )

    @classmethod
    def full(cls) -> "Determinism":
        """Operations without a deterministic implementation raise; a deterministic workspace that is set is kept."""
        chosen = os.environ.get(WORKSPACE)
        return cls(True, False, True, False, chosen if chosen in FIXED else FIXED[0])

    def apply(self) -> None:
        """Put these settings into force."""
        # this also keeps Inductor from choosing kernels by their measured speed, which varies from run to run
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = self.workspace
