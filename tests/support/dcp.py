"""torch's distributed checkpoint in one process, as an oracle and as a peer."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save


def begin_save(state: dict[str, Any], path: Path, stager: Any = None) -> Any:
    """Return the result of torch's `async_save`: a future, or two of them if the stager returns one."""
    return async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)


def load_checkpoint(like: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Load a torch checkpoint into tensors like these."""
    load(like, checkpoint_id=path, no_dist=True)
    return like
