"""One safetensors file: written tensor by tensor in whatever order they come, and read as one piece of memory."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
from torch import Tensor

from drawloom.components.storage.format_names import listed
from drawloom.components.storage.safetensors.header import (
    BadHeader,
    Entry,
    check_writable,
    header_length,
    layout,
    parse_header,
)
from drawloom.components.storage.tensor_bytes import bytes_of, from_memory, view
from drawloom.components.storage.tensor_source import TensorKind


@attrs.define
class SafetensorsWriter:
    """Puts announced tensors into an open file, each at its place; `where` is for messages."""

    where: str
    descriptor: int
    head: bytes
    missing: dict[str, Entry]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors; ValueError if it is not as it was announced."""
        entry = self.missing.pop(name)
        found = TensorKind(tuple(tensor.shape), tensor.dtype)
        if found != entry.kind:
            raise ValueError(f"{name} came as {found}, and was announced as {entry.kind}")
        self._put(bytes_of(tensor), len(self.head) + entry.start)

    def finish(self) -> None:
        """Write the header, and return when all is on disk; ValueError if a tensor never came."""
        if self.missing:
            raise ValueError(f"{listed(list(self.missing))} never came")
        self._put(memoryview(self.head), 0)
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise self._named(error) from error

    def _put(self, data: memoryview, place: int) -> None:
        while data:
            try:
                count = os.pwrite(self.descriptor, data, place)
            except OSError as error:
                raise self._named(error) from error
            data, place = data[count:], place + count

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self.where)


def writer_into(descriptor: int, where: str, kinds: Mapping[str, TensorKind]) -> SafetensorsWriter:
    """
    Writes these tensors into an open, empty file. Its bytes will be those that the safetensors library writes.

    ValueError if a tensor can't be written so that it can be read again.
    """
    check_writable(kinds)
    head, entries = layout(kinds)
    return SafetensorsWriter(where, descriptor, head, entries)


@contextmanager
def new_safetensors_file(path: Path, kinds: Mapping[str, TensorKind]) -> Iterator[SafetensorsWriter]:
    """A new file of these tensors, which is on disk at the end of the block; OSError if it is there already."""
    check_writable(kinds)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        writer = writer_into(descriptor, str(path), kinds)
        yield writer
        writer.finish()
    finally:
        os.close(descriptor)


def tensors_in(memory: Tensor) -> dict[str, Tensor]:
    """The tensors of a file that is in memory (bytes), without a copy; BadHeader if it can't be believed."""
    size = memory.numel()
    length = header_length(view(memory)[:8].tobytes(), size)
    body = memory[8 + length :]
    entries = parse_header(view(memory)[8 : 8 + length].tobytes(), size - 8 - length)
    try:
        return {name: from_memory(body[entry.start : entry.end], entry.kind) for name, entry in entries.items()}
    except RuntimeError as error:  # torch wants each at a multiple of its element's size, and so do we write them
        raise BadHeader(f"a tensor lies where none can be used: {error}") from error
