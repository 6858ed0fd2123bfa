"""
Append-only files in a run folder, such as JSON lines: an object per step, with a checksum.

They are truncated when a run resumes.

A line is `{"step": N, ..., "crc32": C}`, where C is the CRC-32 over the line's bytes without the last entry.
"""

import errno
import json
import logging
import os
import threading
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom import internal
from drawloom.components.storage.durable_files import CHUNK, open_to_append, read_file, replace_file
from drawloom.graph import component_base_class


@attrs.define(eq=False)
class AppendedFile:
    """Open file; if somebody removes it or its folder, the next append rewrites it, with a warning."""

    path: Path
    _descriptor: int

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """Open a file, and create it if it is missing. Raises UserError if it is a link or not a regular file."""
        return cls(path, open_to_append(path))

    def append_what_fits(self, data: bytes) -> int:
        """Append data, and return the number of bytes written, which may be fewer on a nearly full disk."""
        self._restore_if_removed()
        return os.write(self._descriptor, data)

    def read(self) -> bytes:
        """Return the whole content, even if the file was removed."""
        pieces, size = list[bytes](), 0
        while piece := os.pread(self._descriptor, CHUNK, size):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    def replace(self, content: bytes) -> None:
        """
        Replace the content atomically. If the file starts with the new content, truncate it, which works on a
        full disk.
        """
        if self.read().startswith(content):
            os.ftruncate(self._descriptor, len(content))
        else:
            replace_file(self.path, content)
            self._reopen_file()

    def sync(self) -> None:
        """Flush to disk. A write alone survives a killed process, but not a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _restore_if_removed(self) -> None:
        """Rewrite a removed file, whose content is still readable through the open descriptor."""
        if self._is_at_path():
            return
        if not os.path.lexists(self.path):  # otherwise an editor has replaced the file
            if self.path.parent.parent.is_dir():
                self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, self.read())
            log.warning("%s was removed during the run, and is written anew", self.path)
        self._reopen_file()

    def _is_at_path(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _reopen_file(self) -> None:
        """Open the file that is now at the path, and close the old descriptor."""
        old_descriptor, self._descriptor = self._descriptor, open_to_append(self.path)
        os.close(old_descriptor)


BUFFER_SIZE = 2**24  # bytes of lines that could not be written yet; further lines are dropped
MAX_SIZE = 2**34  # bytes of a file; no run writes more
CHECKSUM = "crc32"
MAX_NUMBERS_SHOWN = 5

log = logging.getLogger("drawloom.storage")

Row = dict[str, Any]


@attrs.frozen
class StepLine:
    """Readable line: its step, its object without the checksum, and whether its checksum is wrong."""

    step: int
    row: Row
    text: bytes
    has_changed: bool


@attrs.define
class LogDamage:
    """Damaged lines in a file: line numbers, from 1, and steps for lines with a wrong checksum."""

    unreadable: list[int] = attrs.field(factory=list)
    out_of_order: list[int] = attrs.field(factory=list)
    changed: list[int] = attrs.field(factory=list)

    def __str__(self) -> str:
        parts = [
            _describe_damaged_lines("line is unreadable", "lines are unreadable", "line", self.unreadable),
            _describe_damaged_lines("line is out of order", "lines are out of order", "line", self.out_of_order),
            _describe_damaged_lines(
                "line was changed after it was written", "lines were changed later", "step", self.changed
            ),
        ]
        return ", ".join(filter(None, parts))


@attrs.define(eq=False)
class StepLog:
    """
    Log file with one line per step.

    Unwritable lines stay in memory, with one warning, and are written with a later line.
    """

    _file: AppendedFile
    _buffer: bytes = b""
    _has_warned: bool = False
    _last_written: int = 0  # step
    _last_appended: int = 0  # step, whose line may still be in `_buffer`
    # a background checkpoint flushes from its own thread
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @classmethod
    def open(cls, path: Path) -> "StepLog":
        """Open a file, and create it if it is missing. Raises UserError if it is a link or not a regular file."""
        return cls(AppendedFile.open(path))

    @classmethod
    def open_before(cls, path: Path, step: int) -> "StepLog":
        """Open a file without the lines from this step on."""
        step_log = cls.open(path)
        step_log.rewind_and_get_last_step(step - 1)
        return step_log

    def append(self, row: Row) -> None:
        """Append a row with a `step`, and try to write it at once."""
        with self._lock:
            if len(self._buffer) < BUFFER_SIZE:
                self._buffer += encode_row(row)
            self._last_appended = row["step"]
            self._try_to_write_buffer()

    def flush(self) -> None:
        """Write the lines that are still in memory, and sync the file. Raises OSError if the disk refuses some."""
        with self._lock:
            self._try_to_write_buffer()
            if self._buffer:
                missing = f"the rows of steps {self._last_written + 1} to {self._last_appended} are in memory only"
                raise OSError(errno.ENOSPC, missing, str(self._file.path))
            self._file.sync()

    def rewind_and_get_last_step(self, step: int, known: Mapping[int, Row] | None = None) -> int:
        """
        Remove the lines after a step, and damaged lines with a warning; return the last step kept.

        A line with a wrong checksum is kept, with its values replaced by the `known` row of its step; an
        unreadable line is replaced by the known row.
        """
        with self._lock:
            self._buffer, self._last_written, self._last_appended = b"", step, step
            lines, damage = parse_step_lines(self._file.read())
            kept = {line.step: line for line in lines if line.step <= step}
            damage.changed = [number for number in damage.changed if number in kept]
            repaired = _repair_rows(
                kept, damage, {number: row for number, row in (known or {}).items() if number <= step}
            )
            self._warn_of_damage(damage, repaired)
            rows = {number: line.text + b"\n" for number, line in kept.items()}
            rows |= {number: encode_row(row) for number, row in repaired.items()}
            self._file.replace(b"".join(rows[number] for number in sorted(rows)))
        return max(rows, default=0)

    def close(self) -> None:
        """Write the buffered lines, and close the file."""
        with self._lock:
            self._try_to_write_buffer()
            self._file.close()

    def _try_to_write_buffer(self) -> None:
        """Write as many buffered lines as the disk accepts; an error is only a warning."""
        try:
            while self._buffer:
                self._buffer = self._buffer[self._file.append_what_fits(self._buffer) :]
            self._last_written = self._last_appended
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = "%s: %s; lines are kept in memory until the disk accepts them"
                log.warning(text, self._file.path, error.strerror)

    def _warn_of_damage(self, damage: LogDamage, repaired: Mapping[int, Row]) -> None:
        """Log the damaged lines, and the steps repaired with the checkpoint's values."""
        if text := str(damage):
            names = ", ".join(map(str, sorted(repaired)))
            known = f"; the values of step {names} are the checkpoint's" if repaired else ""
            log.warning("%s is damaged: %s%s", self._file.path, text, known)


@component_base_class
class StepLogWriter:
    """A node with a step log, opened at the first step, and again when a run goes back to an earlier step."""

    _log: StepLog | None = internal(None)
    _newest: int = internal(0)

    @abstractmethod
    def open_before(self, step: int) -> StepLog:
        """Return the log, opened for appending, without lines from `step` on."""

    def append(self, row: Row) -> None:
        """Append a step's row. An earlier process's lines for this and later steps are removed first."""
        step = row["step"]
        if self._log is None or step <= self._newest:
            self.close()
            self._log = self.open_before(step)
        self._newest = step
        self._log.append(row)

    def flush(self) -> None:
        """Write the lines that are still in memory, and sync the file. Raises OSError if the disk refuses some."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Write the buffered lines, and close the file."""
        log, self._log = self._log, None
        if log is not None:
            log.close()


def encode_row(row: Row) -> bytes:
    """Return a row's line, with its checksum."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    return text[:-1] + f', "{CHECKSUM}": {zlib.crc32(text)}}}\n'.encode()


def read_step_log(path: Path) -> tuple[list[StepLine], LogDamage]:
    """Return a file's lines ordered by step, and its damage. Raises OSError if it is not a regular file."""
    try:
        content = read_file(path, MAX_SIZE)
    except FileNotFoundError:
        content = b""
    return parse_step_lines(content)


def parse_step_lines(content: bytes) -> tuple[list[StepLine], LogDamage]:
    """
    Return the readable lines ordered by step, and the damage.

    A last line left incomplete by a kill is not damage. Among lines out of order, lines with a valid checksum
    are kept.
    """
    kept: list[tuple[int, StepLine]] = []
    damage = LogDamage()
    *pieces, last = content.split(b"\n")
    if last and (torn := _parse_line(last)) is not None and not torn.has_changed:
        pieces.append(last)
    for number, piece in enumerate(pieces, 1):
        line = _parse_line(piece)
        if line is None:
            damage.unreadable.append(number)
            continue
        while not line.has_changed and kept and kept[-1][1].has_changed and kept[-1][1].step >= line.step:
            damage.out_of_order.append(kept.pop()[0])
        if kept and kept[-1][1].step >= line.step:
            damage.out_of_order.append(number)
        else:
            kept.append((number, line))
    damage.changed = [line.step for _, line in kept if line.has_changed]
    return [line for _, line in kept], damage


def _parse_line(text: bytes) -> StepLine | None:
    """Return a line, or None if it is not an object with a step."""
    try:
        row = json.loads(text)
        step = row["step"]
        checksum = row.pop(CHECKSUM, None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(step) is not int or step < 0:
        return None
    begin, mark, _ = text.rpartition(f', "{CHECKSUM}": '.encode())
    has_changed = not mark or text != begin + f', "{CHECKSUM}": {zlib.crc32(begin + b"}")}}}'.encode()
    return StepLine(step, row, text, has_changed or type(checksum) is not int)


def _repair_rows(kept: Mapping[int, StepLine], damage: LogDamage, known: Mapping[int, Row]) -> dict[int, Row]:
    """Return the known rows for damaged lines: merged into changed lines, and in place of unreadable lines."""
    repaired = {number: kept[number].row | known[number] for number in damage.changed if number in known}
    if damage.unreadable:
        repaired |= {number: row for number, row in known.items() if number not in kept}
    return repaired


def _describe_damaged_lines(singular: str, plural: str, unit: str, numbers: Sequence[int]) -> str:
    """Describe a kind of damage with the first numbers; empty without damage."""
    if not numbers:
        return ""
    shown = ", ".join(map(str, sorted(numbers)[:MAX_NUMBERS_SHOWN]))
    more = ", ..." if len(numbers) > MAX_NUMBERS_SHOWN else ""
    return f"{len(numbers)} {singular if len(numbers) == 1 else plural} ({unit} {shown}{more})"
