"""Memory shared by a group's ranks."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.graph import UserError
from support.processes import run_ranks


def _share_memory(folder: str) -> tuple[list[int], list[str], str]:
    """Return this rank's view of all memory parts, the remaining files, and the message for a full disk."""
    tempfile.tempdir = folder
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        group = processes.make_group("pair", [[0, 1]])
        memory = group.allocate_symmetric_memory(16)
        memory.parts[group.rank].fill_(group.rank + 7)
        memory.barrier()
        read = [int(part.max()) for part in memory.parts]
        left = os.listdir(folder)
        group.gather_json(None)
        with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
            try:
                group.allocate_symmetric_memory(16)
                said = ""
            except UserError as error:
                said = str(error)
        return read, left, said
    finally:
        processes.close()


def test_ranks_read_each_others_writes(tmp_path: Path) -> None:
    """After a barrier all see the same; the file has no name any more, and a full disk is a message on every rank."""
    for read, left, said in run_ranks(_share_memory, 2, str(tmp_path)):
        assert read == [7, 8] and not left
        assert "can't share memory with rank 0" in said and "32 bytes free" in said


def test_one_process_has_memory_of_its_own() -> None:
    """A group with one rank has one part, filled with zeros."""
    memory = SingleProcess().allocate_symmetric_memory(8)
    memory.barrier()
    assert len(memory.parts) == 1 and torch.equal(memory.parts[0], torch.zeros(8, dtype=torch.uint8))
