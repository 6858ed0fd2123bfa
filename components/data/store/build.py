"""
Makes a token store of parts of documents; killed at any moment, the same call completes it.

Each part becomes one shard, and its bytes depend on nothing but the part and the tokenizer. A shard counts as complete
when its JSON file is there, and the store when `store.json` is; until then `plan.json` says what the store is made of.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store import processes
from drawloom.components.data.store.processes import Progress
from drawloom.components.data.store.shard import ShardFiles, TokenShard, id_dtype
from drawloom.components.data.store.store import FORMAT, LOCK, STORE, Store, fingerprint_of, index_text, read_index
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError

PLAN = "plan.json"
POLL = 0.1  # seconds between two tries to lock a folder
WAITING_INTERVAL = 60.0  # seconds between two messages, which show that the process is alive

log = logging.getLogger("drawloom.data")

Say = Callable[[str], None]


def build(
    folder: Path,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    say: Say = log.info,
    every: float = 10,
) -> Store:
    """
    The store of these parts, which is made or completed if necessary, by one process at a time.

    `tokenizer` is open; `say` is given the progress `every` so many seconds. Raises UserError if the folder holds
    something else.
    """
    plan = plan_of(parts, tokenizer)
    with locked(folder, say) as lock:
        try:
            if not _complete(folder, plan):
                _make(folder, lock, plan, parts, tokenizer, workers=workers, say=say, every=every)
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            raise UserError(
                f"{folder}: the token store can't be written ({reason}); what is written is kept"
            ) from error
    return Store.open(folder)


def plan_of(parts: Sequence[Part], tokenizer: Tokenizer) -> dict[str, Any]:
    """What a store is made of: the same parts and tokenizer give the same."""
    inputs = hashlib.sha256()
    for part in parts:
        inputs.update(f"{part!r}\n".encode("utf-8", "surrogatepass"))
    return {
        "format": FORMAT,
        "inputs": inputs.hexdigest(),
        "tokenizer": tokenizer_digest(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": np.dtype(id_dtype(tokenizer.vocab_size)).name,
        "weighted": False,
        "parts": len(parts),
    }


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A SHA-256 of the files that a tokenizer saves, and of its end token."""
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eos_id}\n".encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            digest.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def locked(folder: Path, say: Say) -> Iterator[int]:
    """Make a folder, and wait until no other process works on it; gives the descriptor that holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({error.strerror}); choose another folder") from error
    try:
        said = -math.inf
        while not _try_lock(descriptor):
            if time.monotonic() - said >= WAITING_INTERVAL:
                say(f"waiting for the process that tokenizes into {folder}")
                said = time.monotonic()
            time.sleep(POLL)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _complete(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether the store is complete. Raises UserError if the folder holds another store, or other files."""
    for name, read in ((STORE, read_index), (PLAN, _read_plan)):
        path = folder / name
        if path.is_file():
            held = read(path)
            if changed := [key for key in plan if held.get(key) != plan[key]]:
                what = {"inputs": "files", "parts": "files"}.get(changed[0], changed[0])
                raise UserError(f"{folder} holds a store of other {what}; choose another folder, or remove this one", 2)
            return name == STORE
    if set(os.listdir(folder)) - {LOCK}:
        raise UserError(f"{folder} holds other files; choose a new folder", 2)
    return False


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove {path.parent}, and make the store anew") from error
    return plan


def _make(
    folder: Path,
    lock: int,
    plan: dict[str, Any],
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    *,
    workers: int,
    say: Say,
    every: float,
) -> None:
    """Write the shards that are missing, and then `store.json`."""
    if not (folder / PLAN).exists():
        replace_file(folder / PLAN, _text(plan))
    missing = {number: part for number, part in enumerate(parts) if not _is_whole(folder, number, plan)}
    sizes = {number: part.size for number, part in missing.items()}
    complete = sum(part.size for part in parts) - sum(sizes.values())
    processes.run(folder, missing, tokenizer, workers, Progress(sizes, complete, say, every), lock)
    shards = [_shard(folder, number, plan) for number in range(len(parts))]
    counts = [[shard.documents, shard.tokens, shard.digest] for shard in shards]
    replace_file(folder / STORE, index_text({**plan, "fingerprint": fingerprint_of(shards), "shards": counts}))
    (folder / PLAN).unlink()


def _shard(folder: Path, number: int, plan: dict[str, Any]) -> TokenShard:
    """A complete shard, as its JSON file describes it."""
    return TokenShard.written(ShardFiles(folder, number), np.dtype(plan["dtype"]).newbyteorder("<"), plan["weighted"])


def _is_whole(folder: Path, number: int, plan: dict[str, Any]) -> bool:
    """Whether a shard was completed, and its files have their sizes."""
    if not ShardFiles(folder, number).path("json").is_file():
        return False
    try:
        _shard(folder, number, plan).check_header()
    except UserError:
        return False
    return True


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value) + "\n").encode()
