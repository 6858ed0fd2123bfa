"""
Shared memory between processes on one machine, freed by the kernel.

A segment has no name in any folder (Linux's memfd): the kernel frees it with the last process that uses it, however
the process ends. The same user's other processes open it through /proc. A sealed segment can't change, so readers get
the validated content.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawloom.components.distributed.torchrun import get_boot_and_namespace_id
from drawloom.components.storage.durable_files import FileWriter
from drawloom.components.storage.safetensors.header import HeaderError, open_mapped_safetensors_file
from drawloom.components.storage.safetensors.writer import build_header_and_entries, write_planned_tensors
from drawloom.components.storage.state_tree import PackedState
from drawloom.components.storage.strict_json import encode_canonical, parse_strict_json
from drawloom.components.storage.tensor_source import InMemoryTensors
from drawloom.components.workspace.shared_folder import MAX_PARTS
from drawloom.graph import UserError

TOKEN_SIZE = 16  # bytes at the start of a segment, to recognise it

SharedMemoryTicket = dict[str, Any]
"""Location of a packed state, as JSON: machine, process, its two open files, and the token of the first."""


@contextmanager
def share_in_memory(packed: PackedState) -> Iterator[SharedMemoryTicket]:
    """Share a packed state in memory until the context or this process ends; processes with the state open keep it."""
    token = secrets.token_bytes(TOKEN_SIZE)
    with _open_segment() as text, _open_segment() as tensors:
        with os.fdopen(os.dup(text), "wb") as file:
            file.write(token + encode_canonical(packed.tree))
        head, entries = build_header_and_entries(InMemoryTensors(packed.tensors).specs())
        write_planned_tensors(FileWriter("shared memory", tensors), packed.tensors, head, entries)
        for descriptor in (text, tensors):
            _seal_segment(descriptor)
        yield {
            "machine": get_boot_and_namespace_id(),
            "process": os.getpid(),
            "files": [text, tensors],
            "token": token.hex(),
        }


def open_shared_state(ticket: SharedMemoryTicket) -> PackedState:
    """
    Open another process's packed state. Its tensors are copy-on-write views on the shared memory.

    Raises UserError if it is on another machine, or gone.
    """
    if ticket["machine"] != get_boot_and_namespace_id():
        raise UserError(
            "ranks on several machines can't share memory; give workspace_path, a folder visible to all ranks"
        )
    text, tensors = (Path(f"/proc/{ticket['process']}/fd/{number}") for number in ticket["files"])
    try:
        content = text.read_bytes()
    except OSError as error:
        raise UserError(
            f"the memory behind {text} can't be opened ({error.strerror}); see that process's log"
        ) from error
    if content[:TOKEN_SIZE] != bytes.fromhex(ticket["token"]):
        raise UserError(f"the memory that process {ticket['process']} shared is gone; see that process's log")
    try:
        mapped = open_mapped_safetensors_file(tensors)
        return PackedState(
            parse_strict_json(content[TOKEN_SIZE:], max_values=MAX_PARTS),
            {name: mapped.get_tensor(name) for name in mapped.offset_keys()},
        )
    except (HeaderError, ValueError) as error:
        raise UserError(f"the memory that process {ticket['process']} shared can't be read: {error}") from error


@contextmanager
def _open_segment() -> Iterator[int]:
    """Return the descriptor of a new anonymous memory file, closed at the end of the context."""
    if not hasattr(os, "memfd_create"):
        raise UserError("ranks can share memory on Linux only; give workspace_path, a folder visible to all ranks")
    descriptor = os.memfd_create("drawloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _seal_segment(descriptor: int) -> None:
    """Forbid all later changes to a memory file."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
