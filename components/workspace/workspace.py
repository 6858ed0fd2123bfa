"""
A workspace that ranks share: each lays down a configuration and tensors, and one of them reads what it needs.

The workspace is a folder on storage that all ranks see, or, without a folder, memory of the one machine that they run
on. In a folder nothing is locked, which network storage does badly: a file is written under a name of its own and is
on disk before a rename publishes it; it carries its digest, so that a reader sees all of one generation or an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import SingleProcess, TorchGroup
from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.distributed.torchrun import read_launch
from drawloom.components.ports.distributed import Group
from drawloom.components.storage.state_tree import Packed, pack, unpack
from drawloom.components.workspace.shared_folder import publish, read, withdraw
from drawloom.components.workspace.shared_memory import open_shared, shared
from drawloom.graph import UserError


class NFSWorkspace:
    """
    A folder in which every rank has one place, for a configuration and weights.

    Nothing here waits for other ranks: who reads must know that the writer is done, by a barrier or an agreement.
    Made without a path it is not initialised, and its methods raise ValueError. `rank` is this process's among all
    that use the folder; torch's or torchrun's if left out. What a dead process left in its place is removed.
    """

    def __init__(self, workspace_path: Path | str | None = None, rank: int | None = None) -> None:
        self.rank = _own_rank() if rank is None else rank
        self._path = None if workspace_path is None else Path(workspace_path).absolute()
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
            withdraw(self._path, self.rank)

    @property
    def is_initialized(self) -> bool:
        """Whether there is a folder."""
        return self._path is not None

    def write_configs_and_weights(self, config_json: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> str:
        """
        Publish a configuration (what JSON can say) and weights in this rank's place, instead of what was there.

        Gives the name of this generation. TypeError or ValueError for what can't be written as JSON or safetensors.
        """
        tree, tensors = pack(config_json)
        if tensors:
            raise TypeError("a configuration holds tensors; give them as weights")
        return publish(self._folder, self.rank, Packed(tree, dict(weights)))

    def read_configs_and_weights_from_rank(self, target_rank: int) -> tuple[Any, dict[str, Tensor] | None]:
        """What a rank published last, or (None, None); UserError if it is damaged. The weights are on the CPU."""
        found = read(self._folder, target_rank)
        return (None, None) if found is None else (unpack(found.tree, {}), dict(found.tensors))

    def close(self) -> None:
        """Empty this rank's place."""
        withdraw(self._folder, self.rank)

    def __enter__(self) -> "NFSWorkspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _folder(self) -> Path:
        if self._path is None:
            raise ValueError("the workspace has no folder; give workspace_path")
        return self._path


@contextmanager
def get_configs_parallel(
    config: Mapping[str, Any] | None, ranks: Sequence[int], group: Group, workspace_path: Path | str | None = None
) -> Iterator[list[Any]]:
    """
    Everybody's configuration on the first of `ranks`, in the order of `ranks`; an empty list on all others.

    All of the group enter, and leave, together. `ranks` are places in the group, the same on every rank. A
    configuration is None, or a mapping of what JSON can say and of tensors, which arrive on the CPU. It travels
    through a folder that all see or, without one, through memory of the machine; neither is left behind. The list is
    emptied at the end of the block; what was kept of it stays good. An error on any rank is an error on all.
    """
    with _gathered(config, ranks, group, workspace_path) as configs:
        yield configs


@contextmanager
def get_tensors_parallel(tensor: Tensor, ranks: Sequence[int], group: Group | None = None) -> Iterator[list[Tensor]]:
    """
    Everybody's tensor on the first of `ranks`, in the order of `ranks`; an empty list on all others.

    As with configurations, through memory of the machine. Shapes and dtypes may differ; the first rank's own tensor
    is the one that it gave. Without a group it is all processes, or this one alone.
    """
    with _gathered(tensor, ranks, _everyone() if group is None else group, None) as tensors:
        yield tensors


@contextmanager
def _gathered(mine: Any, ranks: Sequence[int], group: Group, workspace_path: Path | str | None) -> Iterator[list[Any]]:
    with ExitStack() as lent:
        _, tickets = run_on_all(
            group, lambda: _lend(mine, ranks, group, workspace_path, lent), share=lambda ticket: ticket
        )
        asked = group.gather_json([*ranks])
        if any(each != [*ranks] for each in asked):
            raise UserError(f"ranks were {asked} on the ranks of a group; give all the same")
        others = [tickets[rank] for rank in ranks[1:]]
        gathered, _ = run_on_all(group, lambda: _collect(mine, others, ranks[0] == group.rank, workspace_path))
    with _ending_together(group):
        try:
            yield gathered
        finally:
            gathered.clear()


def _lend(mine: Any, ranks: Sequence[int], group: Group, path: Path | str | None, lent: ExitStack) -> Any:
    """Publish what this rank has, unless it is the reader, until `lent` is closed; a ticket for it."""
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < group.size for rank in ranks):
        raise UserError(f"ranks = {[*ranks]} are not places, each once, in a group of {group.size}; count from 0")
    if group.rank not in ranks[1:]:
        return None
    if path is None:
        return lent.enter_context(shared(pack(mine)))
    workspace = lent.enter_context(NFSWorkspace(path))
    return {"rank": workspace.rank, "generation": publish(Path(path).absolute(), workspace.rank, pack(mine))}


def _collect(mine: Any, tickets: list[Any], is_reader: bool, path: Path | str | None) -> list[Any]:
    """On the reader its own and what the others published, on other ranks nothing."""
    return [mine, *(unpack(*_opened(ticket, path)) for ticket in tickets)] if is_reader else []


def _opened(ticket: Any, path: Path | str | None) -> Packed:
    if path is None:
        return open_shared(ticket)
    found = read(Path(path).absolute(), ticket["rank"], ticket["generation"])
    if found is None:
        raise UserError(f"{path} holds nothing of rank {ticket['rank']}; do all ranks see the same folder there?")
    return found


@contextmanager
def _ending_together(group: Group) -> Iterator[None]:
    """A block that fails on all ranks if it fails on one; a rank on which it failed raises its own error."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        run_on_all(group, _raising(failure))
    except UserError:
        if failure is not None:
            raise failure from None
        raise


def _raising(failure: Exception | None) -> Callable[[], None]:
    def work() -> None:
        if failure is not None:
            raise failure

    return work


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else read_launch().rank


def _everyone() -> Group:
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    on_device = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    return TorchGroup("world", range(dist.get_world_size()), dist.group.WORLD, device)
