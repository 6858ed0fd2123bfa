"""torch's distributed checkpoint in one process, as an oracle and as a peer."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save


def begin_save(state: dict[str, Any], path: Path, stager: Any = None) -> Any:
    """What `async_save` of torch gives: a future, or two of them if the stager gives one."""
    return async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)


def loaded(like: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """What a checkpoint of torch holds, in the place of these tensors."""
    load(like, checkpoint_id=path, no_dist=True)
    return like
