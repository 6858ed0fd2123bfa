"""
Token dispatch to experts on other GPUs and back (expert parallelism): `make bench NAME=dispatch RANKS=2`.

Every GPU has 4096 tokens (width 4096, bfloat16). A token chooses 1, 2 or 8 of 16 experts at random. `dispatch` ends
with rows sorted by expert; `combine` starts from such rows and ends with sums by token; both run without gradients.
torch's `all_to_all_vdev_2d` over NVSHMEM moves copied and sorted rows only, so its time includes our copies and sums.
Calls that never wait for the host are also replayed as CUDA graphs. Times are mean microseconds per call on the slowest
GPU. `--trace` prints the operations.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.experts.all_to_all import AllToAllExperts  # noqa: E402
from drawloom.components.experts.symmetric import SymmetricExperts  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402

TOKENS, WIDTH, EXPERTS = (8, 8, 4) if TINY else (4096, 4096, 16)
TORCH, TRACE = "--torch", "--trace"
GRAPHS = "capacity"
"""Dispatchers with this word in their name never wait for the host, and can be captured."""
CALLS, WARM_UPS = (2, 1) if TINY else (50, 10)

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def main() -> None:
    """Measure our dispatchers and torch's in separate processes."""
    if "RANK" in os.environ:
        return _worker()
    starter = ["-m", "torch.distributed.run", "--nproc-per-node", os.environ.get("RANKS", "2")]
    for flags in ([], [TORCH]):  # torch's needs another kind of symmetric memory, which a process can choose once
        subprocess.run([sys.executable, *starter, str(Path(__file__)), *sys.argv[1:], *flags], check=True)


def _worker() -> None:
    kind: Any = "cpu" if TINY else "cuda"
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, data_replicate=1, data_shard=processes.world_size, expert=processes.world_size)
    mesh.open()
    kernels = AutoKernels(device=device)
    common: Any = {"kernels": kernels, "mesh": mesh}
    dispatchers = {
        "experts.all_to_all": AllToAllExperts(**common),
        "experts.symmetric": SymmetricExperts(**common, max_tokens=TOKENS),
        "experts.symmetric, capacity": SymmetricExperts(**common, max_tokens=TOKENS, capacity=1.25),
    }
    try:
        for choices in (1, 2, 8 if not TINY else 2):
            torch.manual_seed(processes.rank)
            scores = torch.rand(TOKENS, EXPERTS, device=device.device)
            probabilities, chosen = scores.topk(choices)
            hidden = torch.randn(TOKENS, WIDTH, device=device.device, dtype=torch.float32 if TINY else torch.bfloat16)
            if TORCH in sys.argv:
                _print_line(
                    "torch, all_to_all_vdev_2d", choices, _prepare_torch(kernels, hidden, chosen, mesh), device, mesh
                )
                continue
            for name, dispatcher in dispatchers.items():
                _print_line(name, choices, _prepare_ours(dispatcher, hidden, chosen, probabilities), device, mesh)
    finally:
        processes.close()


def _prepare_ours(dispatcher: Any, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Callable[[], Pair]:
    def prepare() -> Pair:
        dispatched = dispatcher.dispatch(hidden, chosen, probabilities, EXPERTS)
        return (
            lambda: dispatcher.dispatch(hidden, chosen, probabilities, EXPERTS),
            lambda: dispatched.combine(dispatched.rows),
        )

    return prepare


def _prepare_torch(kernels: AutoKernels, hidden: Tensor, chosen: Tensor, mesh: RankMesh) -> Callable[[], Pair]:
    """Return torch's calls: copy rows by expert, exchange them with the row counts, and sum the returned rows."""

    def prepare() -> Pair:
        import torch.distributed._symmetric_memory as symmetric

        if not symmetric.is_nvshmem_available():
            raise RuntimeError("torch was built without NVSHMEM, or its library is missing")
        symmetric.set_backend("NVSHMEM")
        group: Any = mesh.expert_group
        name, ranks = group.handle.group_name, mesh.sizes.expert
        rows = TOKENS * chosen.shape[1]
        sent, back = (symmetric.empty(rows, WIDTH, dtype=hidden.dtype, device=hidden.device) for _ in range(2))
        received = symmetric.empty(2 * ranks * rows, WIDTH, dtype=hidden.dtype, device=hidden.device)
        splits = symmetric.empty(EXPERTS, dtype=torch.int64, device=hidden.device)
        received_splits = symmetric.empty(2, EXPERTS, dtype=torch.int64, device=hidden.device)
        returned_splits = symmetric.empty(2, EXPERTS, dtype=torch.int64, device=hidden.device)
        for buffer in (sent, back, received, splits, received_splits, returned_splits):
            symmetric.rendezvous(buffer, name)
        unused = torch.zeros(chosen.shape, device=hidden.device)
        routes = kernels.moe_routes(chosen, EXPERTS)

        def dispatch() -> None:
            here = kernels.moe_routes(chosen, EXPERTS)
            sent.copy_(kernels.moe_permute(hidden, unused, here)[0])
            splits.copy_(here[2].diff(prepend=here[2].new_zeros(1)))
            torch.ops.symm_mem.all_to_all_vdev_2d(sent, received, splits, received_splits, name)

        def combine() -> Tensor:
            torch.ops.symm_mem.all_to_all_vdev_2d_offset(received, back, received_splits, returned_splits, name)
            return kernels.moe_unpermute(back, routes)

        dispatch()
        return dispatch, combine

    return prepare


@torch.no_grad()
def _print_line(name: str, choices: int, prepare: Callable[[], Pair], device: ComputeDevice, mesh: RankMesh) -> None:
    try:
        pair = prepare()
        text = "".join(f"{_microseconds(call, device, mesh):>12,.0f}" for call in pair)
        if GRAPHS in name and device.device.type == "cuda":
            text += ", as CUDA graphs"
            text += "".join(f"{_microseconds(_capture(call), device, mesh):>12,.0f}" for call in pair)
    except (RuntimeError, AttributeError, ImportError) as failure:  # the next dispatcher runs
        text = f"  {type(failure).__name__}: {failure}".splitlines()[0][:120]
    if TRACE in sys.argv and TORCH not in sys.argv:
        with torch.profiler.profile() as profile:
            pair = prepare()
            for call in pair * 5:
                call()
        if mesh.world.rank == 0:
            print(
                profile.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=60)
            )
    if mesh.world.rank == 0:
        print(f"{name:<32}{choices} experts per token, us: dispatch, combine{text}", flush=True)


def _capture(call: Callable[[], Any]) -> Callable[[], None]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
        call()  # exchanges alternate between two halves of a buffer
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _microseconds(call: Callable[[], Any], device: ComputeDevice, mesh: RankMesh) -> float:
    gpu = device.device.type == "cuda"
    for number in range(WARM_UPS + CALLS):
        if number == WARM_UPS:
            mesh.world.gather_json(None)
            torch.cuda.synchronize() if gpu else None
            start = time.perf_counter()
        call()
    torch.cuda.synchronize() if gpu else None
    seconds = torch.tensor([time.perf_counter() - start])
    mesh.world.max(seconds)
    return float(seconds) / CALLS * 1e6


if __name__ == "__main__":
    main()
