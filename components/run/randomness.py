"""
A process's global random generators: torch's, Python's and numpy's.

With `deterministic`, torch's process-wide settings make results on a GPU bitwise reproducible. cuBLAS reads
CUBLAS_WORKSPACE_CONFIG at the first matmul on a device, and torch checks the variable at every deterministic matmul. So
it is set before the run's first matmul; earlier nodes only move and fill tensors. A process with earlier matmuls, such
as a notebook, keeps its workspaces. torch has one workspace per stream, so results do not depend on other streams.
"""

import os
import random
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from drawloom import UserError, component, internal, setting
from drawloom.components.distributed.rng import create_generator, derive_seed
from drawloom.ports import Mesh, NodeState, RunInfo

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


@component
class ProcessRandomness:
    """
    Global generators' owner: seeds them for this rank, checkpoints their states, and restores them on close.

    Random numbers, and all results on a CPU, are reproducible. On a GPU some operations (atomic adds) sum in a
    different order in every run, unless `deterministic` is on.
    """

    state_is_local: ClassVar[bool] = True

    job: RunInfo
    mesh: Mesh
    deterministic: bool = setting(
        "whether GPUs use deterministic algorithms, which are slower; operations without one raise an error",
        default=False,
    )

    _before: dict[str, Any] | None = internal(None)
    _determinism_before: Determinism | None = internal(None)

    def open(self) -> None:
        """Seed every generator from the run's seed, the rank and the generator's name."""
        if self.deterministic:
            self._determinism_before = Determinism.read_current()
            Determinism.fully_deterministic().apply()
        self._before = read_generator_states()
        rank = self.mesh.world.rank
        torch.manual_seed(derive_seed(self.job.seed, "process", "torch", rank))
        random.seed(derive_seed(self.job.seed, "process", "python", rank))
        np.random.seed(derive_seed(self.job.seed, "process", "numpy", rank) % 2**32)  # numpy takes 32 bits

    def close(self) -> None:
        """Restore the generators and the determinism settings from before the run."""
        if self._before is not None:
            set_generator_states(self._before)
            self._before = None
        if self._determinism_before is not None:
            self._determinism_before.apply()
            self._determinism_before = None

    def on_failure(self, error: BaseException) -> BaseException | None:
        """Return a UserError for an operation without a deterministic implementation in torch."""
        # torch raises a plain RuntimeError for it; only its text tells it apart
        if not (self.deterministic and isinstance(error, RuntimeError) and "does not have a determ" in str(error)):
            return None
        refused = str(error).partition(", but you set")[0]
        return UserError(
            f"randomness.deterministic is on, and {refused} on this device; choose another implementation in "
            "[kernels], or write deterministic = false"
        )

    def stream(self, *purpose: str | int) -> torch.Generator:
        """Return a CPU generator for `purpose`, seeded from the run's seed without the rank: equal on all ranks."""
        return create_generator(self.job.seed, *purpose)

    def state_dict(self) -> NodeState:
        """Return this rank's generator states."""
        return read_generator_states()

    def load_state_dict(self, state: NodeState) -> None:
        """Set this rank's generator states; skip the GPU's if the state or this process has none."""
        set_generator_states(state)


def read_generator_states() -> dict[str, Any]:
    """Return the process's generator states, as tensors and plain values."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": _read_numpy_state(),
    }


def set_generator_states(state: NodeState) -> None:
    """Set the process's generator states to a `read_generator_states` result."""
    python = state["python"]
    torch.set_rng_state(state["torch"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_restore_numpy_arrays(state["numpy"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state["cuda"])


def _read_numpy_state() -> NodeState:
    state: Any = np.random.get_state(legacy=False)
    return {
        "bit_generator": state["bit_generator"],
        "words": torch.from_numpy(state["state"]["key"].astype(np.int64)),  # torch has few operations for uint32
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _restore_numpy_arrays(state: NodeState) -> dict[str, Any]:
    words = state["words"].numpy().astype(np.uint32)
    return {
        "bit_generator": state["bit_generator"],
        "state": {"key": words, "pos": state["position"]},
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }
