"""
What NCCL can do after the loss of a rank: `python tests/benchmarks/gpu/nccl_abort.py`, 45 s.

Three processes have a GPU each, and the first is killed during an all-reduce. The others abort their communicator from
another thread, ask the device for a result, and make a group of two. With two GPUs, the third process is a spare, which
joins the second group on the killed one's GPU; with one GPU, all share it. Every line has a process's rank and its
seconds; a process that hangs prints its stack after LIMIT seconds.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

LIMIT = 34
RANKS = 3
ABORT_AFTER = 2.5  # seconds, in which the survivors wait for the dead rank


def main() -> None:
    """Start three processes, and wait for them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(store.port)]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT + 10)
        process.kill()


def run_rank(port: int, rank: int) -> None:
    """Lose rank 0, abort the communicator, and make another one."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # errors must not end the process
    devices = torch.cuda.device_count()
    size = 2 if devices == 2 else RANKS
    if devices == 1:  # refused unless the ranks seem to be on different hosts
        os.environ["NCCL_HOSTID"] = str(os.getpid())
    begin = time.monotonic()

    def say(*words: object) -> None:
        print(f"rank {rank}, {time.monotonic() - begin:5.2f} s:", *words, flush=True)

    def make_group(name: str, own_rank: int, size: int) -> None:
        dist.init_process_group(
            "nccl", store=PrefixStore(name, store), rank=own_rank, world_size=size, device_id=device, timeout=minute
        )

    device, minute = torch.device("cuda", rank % devices), timedelta(seconds=60)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    x = torch.ones(4, device=device)
    if rank < size:
        make_group("first", rank, size)
        dist.all_reduce(x)
        say(f"the sum over {size} ranks is", x[0].item())
        others = [f"ready {other}" for other in range(1, size)]
        if rank == 0:
            store.wait(others)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        group = dist.group.WORLD
        assert group is not None
        abort = threading.Timer(ABORT_AFTER, group.abort)
        abort.start()
        store.set(f"ready {rank}", "")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        abort.join()
        say("aborted")
        dist.distributed_c10d._abort_process_group()
        say("the device answers", torch.ones(3, device=device).sum().item())
        store.set("aborted", "")
    store.wait(["aborted"])
    x = torch.full((4,), float(rank), device=device)
    make_group("two", rank - 1, RANKS - 1)
    say("made another group")
    dist.all_reduce(x)
    say("the sum over ranks 1 and 2 is", x[0].item())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
