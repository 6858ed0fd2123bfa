"""Private names in torch, looked up before a run starts: a release may lack them."""

from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from drawloom import UserError

TESTED = ">=2.11,<2.16"
"""The tested releases (`make test-versions`), as in pyproject.toml."""

PRIVATE_NAMES = (
    "_C._current_graph_task_id",
    "_C._functions.AccumulateGrad",
    "_C._functions.AddmmBackward0",
    "_C._functions.ConvolutionBackward0",
    "_C._functions.MmBackward0",
    "_C._functions.TBackward0",
    "_C._functions.ToCopyBackward0",
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_zero_",
    "_scaled_mm",
    "cuda.memory._dump_snapshot",
    "cuda.memory._record_memory_history",
    "Tensor._backward_hooks",
    "Tensor._base",
    "Tensor._is_view",
    "Tensor._post_accumulate_grad_hooks",
    "Tensor._version",
    "distributed.distributed_c10d.ProcessGroupGloo._Options",
    "ops.aten._flash_attention_backward",
    "ops.aten._flash_attention_forward",
    "ops.aten._grouped_mm",
    "ops.aten._scaled_dot_product_cudnn_attention",
    "ops.aten._scaled_dot_product_cudnn_attention_backward",
    "ops.aten._unsafe_view",
)
"""The private names in `torch`, except for `import_private_name`'s."""


def check_torch_has_private_names() -> None:
    """Raise UserError if this torch lacks one of the private names."""
    for name in PRIVATE_NAMES:
        try:
            attrgetter(name)(torch)
        except AttributeError:
            raise _create_release_error(f"torch.{name}") from None


def import_private_name(module: str, name: str) -> Any:
    """Return a private name from a module with a long import; UserError if this torch lacks it."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise _create_release_error(f"{module}.{name}") from None


def _create_release_error(name: str) -> UserError:
    return UserError(
        f"torch {torch.__version__} lacks {name}, which drawloom needs; drawloom is tested with torch {TESTED}: "
        f"pip install 'torch{TESTED}'",
        exit_code=2,
    )
