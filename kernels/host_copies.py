"""The operator that stands for a copy between host memory and the device on the meta device."""

import torch
from torch import Tensor

from drawloom.kernels.operation import register_costs

# An operator, so a plan sees it among a module's operators.
torch.library.define("drawloom::copy_host_memory", "(Tensor copied) -> Tensor")

COPY = torch.ops.drawloom.copy_host_memory


@torch.library.register_fake("drawloom::copy_host_memory")  # type: ignore[untyped-decorator]
def _fake_copy(copied: Tensor) -> Tensor:
    """Return an empty meta tensor of the same shape and dtype."""
    return torch.empty_like(copied)


register_costs(COPY)


def trace_copy_on_meta(copied: Tensor) -> Tensor:
    """Return a meta tensor in place of a tensor's copy, in either direction (same shape and dtype)."""
    copy: Tensor = COPY(copied)
    return copy
