"""
Workspace shared by ranks: all publish a configuration and tensors, and one rank reads them.

The workspace is a folder visible to all ranks or, without a folder, their machine's shared memory. A folder needs no
locks, which are unreliable on network storage: a file is written under a unique name and flushed before a rename
publishes it; its record has a checksum, so a reader gets one whole generation or an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.distributed.torchrun import read_launch
from drawloom.components.ports.distributed import Group
from drawloom.components.storage.state_tree import pack_state, unpack_state
from drawloom.components.workspace.shared_folder import publish_record, read_record, remove_record
from drawloom.components.workspace.shared_memory import open_shared_state, share_in_memory
from drawloom.graph import UserError


class NFSWorkspace:
    """
    Folder in which every rank publishes one record: a configuration and weights.

    No method waits for other ranks: readers must know that the writer is done, for example by a barrier. Without a
    path the workspace is not initialized, and its methods raise ValueError. `rank` is this process's rank
    among all users of the folder; default: torch's or torchrun's rank. A dead process's leftovers with the same rank
    are removed.
    """

    def __init__(self, workspace_path: Path | str | None = None, rank: int | None = None) -> None:
        self.rank = _own_rank() if rank is None else rank
        self._path = None if workspace_path is None else Path(workspace_path).absolute()
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
            remove_record(self._path, self.rank)

    @property
    def is_initialized(self) -> bool:
        """Whether there is a folder."""
        return self._path is not None

    def write_configs_and_weights(self, config_json: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> str:
        """
        Replace this rank's record: a configuration (JSON values and tensors) and weights, of any shape and
        dtype.

        Returns the generation's name. Raises TypeError or ValueError for values that JSON or safetensors
        lack.
        """
        return publish_record(self._folder, self.rank, pack_state({"config": config_json, "weights": dict(weights)}))

    def read_configs_and_weights_from_rank(
        self, target_rank: int, awaited_generation: str | None = None
    ) -> tuple[Any, dict[str, Tensor] | None]:
        """
        Return a rank's configuration and weights (any shape, on the CPU), or (None, None) without a
        record.

        With `awaited_generation`, waits until it is visible. Raises UserError if the record is corrupt, or does
        not appear.
        """
        packed = read_record(self._folder, target_rank, awaited_generation)
        record = {"config": None, "weights": None} if packed is None else unpack_state(packed[0], packed[1])
        return record["config"], record["weights"]

    def close(self) -> None:
        """Remove this rank's record."""
        remove_record(self._folder, self.rank)

    def __enter__(self) -> "NFSWorkspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _folder(self) -> Path:
        """The folder. Raises ValueError if there is none."""
        if self._path is None:
            raise ValueError("the workspace has no folder; give workspace_path")
        return self._path


@contextmanager
def get_configs_parallel(
    config: Mapping[str, Any] | None, ranks: Sequence[int], group: Group, workspace_path: Path | str | None = None
) -> Iterator[list[Any]]:
    """
    Gather the configurations from all `ranks`, in their order, on the first one; other ranks get an empty list.

    A collective of the group, at the start and at the end of the context. `ranks` are ranks in the group, the same
    on every rank. A configuration is None, or a mapping of JSON values and tensors of any shape, which arrive on
    the CPU. It is passed through a folder visible to all ranks or, without one, through shared memory; nothing is
    left behind. The list is emptied at the end of the context; elements kept by the caller stay valid. An error on
    any rank is raised on all ranks.
    """
    with _gather_values_on_first_rank(config, ranks, group, workspace_path) as configs:
        yield configs


@contextmanager
def get_tensors_parallel(tensor: Tensor, ranks: Sequence[int], group: Group | None = None) -> Iterator[list[Tensor]]:
    """
    Gather the tensors from all `ranks`, in their order, on the first one; other ranks get an empty list.

    Like `get_configs_parallel`, through shared memory. tensor: any shape and dtype, which may differ between ranks;
    the first rank's tensor is not copied. The default group is all processes, or this one alone.
    """
    with _gather_values_on_first_rank(tensor, ranks, _default_group() if group is None else group, None) as tensors:
        yield tensors


@contextmanager
def _gather_values_on_first_rank(
    value: Any, ranks: Sequence[int], group: Group, workspace_path: Path | str | None
) -> Iterator[list[Any]]:
    """Return all ranks' values on the first one, as `get_configs_parallel` does."""
    with ExitStack() as lent:
        _, tickets = run_and_gather_on_all_ranks(
            group, lambda: _publish_value(value, ranks, group, workspace_path, lent), to_json=lambda ticket: ticket
        )
        # ranks that disagree would wait for each other for ever
        requested = group.gather_json([*ranks])
        if any(request != [*ranks] for request in requested):
            raise UserError(f"the ranks of a group passed ranks = {requested}; pass the same list on every rank")
        others = [tickets[rank] for rank in ranks[1:]]
        gathered, _ = run_and_gather_on_all_ranks(
            group, lambda: _read_values_if_reader(value, others, ranks[0] == group.rank, workspace_path)
        )
    with _fail_on_all_ranks(group):
        try:
            yield gathered
        finally:
            gathered.clear()


def _publish_value(value: Any, ranks: Sequence[int], group: Group, path: Path | str | None, lent: ExitStack) -> Any:
    """
    Publish this rank's value until `lent` is closed, and return the ticket to open it; the reader publishes nothing.
    """
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < group.size for rank in ranks):
        raise UserError(f"ranks = {[*ranks]} are not distinct ranks of a group of {group.size}; count from 0")
    if group.rank not in ranks[1:]:
        return None
    if path is None:
        return lent.enter_context(share_in_memory(pack_state({"config": value})))
    workspace = lent.enter_context(NFSWorkspace(path))
    return {"rank": workspace.rank, "generation": workspace.write_configs_and_weights(value, {})}


def _read_values_if_reader(value: Any, tickets: list[Any], is_reader: bool, path: Path | str | None) -> list[Any]:
    """On the reader, return its own value and the values behind the tickets; on other ranks an empty list."""
    if not is_reader:
        return []
    if path is None:
        return [value, *(unpack_state(tree, tensors)["config"] for tree, tensors in map(open_shared_state, tickets))]
    workspace = NFSWorkspace(path)
    read_record = workspace.read_configs_and_weights_from_rank
    return [value, *(read_record(ticket["rank"], ticket["generation"])[0] for ticket in tickets)]


@contextmanager
def _fail_on_all_ranks(group: Group) -> Iterator[None]:
    """Fail on all ranks if the block fails on one; the failing rank raises its own error."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        run_and_gather_on_all_ranks(group, _make_failure_raiser(failure))
    except UserError:
        if failure is not None:
            raise failure from None
        raise


def _make_failure_raiser(failure: Exception | None) -> Callable[[], None]:
    """Return a function that raises the failure, if there is one."""

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    return raise_failure


def _own_rank() -> int:
    """Return torch's rank if torch.distributed is initialized, else torchrun's."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else read_launch().rank


def _default_group() -> Group:
    """Return a group with all processes, or with this one if torch.distributed is not initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    # NCCL sends from GPUs, gloo from the CPU
    on_device = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    return TorchGroup("world", range(dist.get_world_size()), dist.group.WORLD, device)
