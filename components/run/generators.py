"""
Random generators, and torch's settings for deterministic results.

cuBLAS reads CUBLAS_WORKSPACE_CONFIG at the first matmul on a device, and torch checks the variable at every
deterministic matmul. So it is set before the run's first matmul; earlier nodes only move and fill tensors. A process
with earlier matmuls, such as a notebook, keeps its workspaces. torch has one workspace per stream, so results do not
depend on other streams.
"""

import os
import random
from typing import Any

import attrs
import numpy as np
import torch

from drawloom.components.distributed.rng import derive_seed
from drawloom.ports import NodeState

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Workspace configurations that make cuBLAS deterministic; the first is faster."""


@attrs.frozen
class Determinism:
    """Determinism settings in torch, cuDNN and cuBLAS."""

    algorithms: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    workspace: str | None

    @classmethod
    def read_current(cls) -> "Determinism":
        """Return this process's current settings."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(WORKSPACE),
        )

    @classmethod
    def fully_deterministic(cls) -> "Determinism":
        """Return settings to reject nondeterministic operations, with the environment's workspace if it fits."""
        workspace = os.environ.get(WORKSPACE)
        if workspace not in DETERMINISTIC_WORKSPACES:
            workspace = DETERMINISTIC_WORKSPACES[0]
        return cls(True, False, True, False, workspace)

    def apply(self) -> None:
        """Set torch, cuDNN and the environment to these settings."""
        # this also keeps Inductor from choosing kernels by their measured speed, which varies from run to run
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = self.workspace


def seed_generators(seed: int, rank: int) -> None:
    """Seed every generator from the run's seed, the rank and the generator's name."""
    torch.manual_seed(derive_seed(seed, "process", "torch", rank))
    random.seed(derive_seed(seed, "process", "python", rank))
    np.random.seed(derive_seed(seed, "process", "numpy", rank) % 2**32)  # numpy takes 32 bits


def set_generator_states(state: NodeState) -> None:
    """Set the process's generators to a state from `ProcessRandomness.state_dict`."""
    python = state["python"]
    torch.set_rng_state(state["torch"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_restore_numpy_arrays(state["numpy"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state["cuda"])


def _restore_numpy_arrays(state: NodeState) -> dict[str, Any]:
    words = state["words"].numpy().astype(np.uint32)
    return {
        "bit_generator": state["bit_generator"],
        "state": {"key": words, "pos": state["position"]},
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }
