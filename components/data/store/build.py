"""
Writer for token stores. If it is killed, the same call completes the store.

Every part becomes one shard, with bytes determined by the part and the tokenizer. A shard is complete when its JSON
file exists, and the store when `store.json` exists; until then `plan.json` describes the input.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from drawloom import UserError
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store.store import (
    FORMAT,
    LOCK,
    STORE,
    Store,
    TokenShard,
    choose_id_dtype,
    encode_index_with_digest,
    get_shard_stem,
    hash_documents,
    read_index,
)
from drawloom.components.data.store.tokenizing import Progress, tokenize_part_into_shard
from drawloom.components.storage.durable_files import replace_file
from drawloom.ports import Tokenizer


def tokenize_parts_into_shards(
    folder: Path, parts: dict[int, Part], tokenizer: Tokenizer, workers: int, progress: Progress, lock: int
) -> None:
    """
    Write shards for these parts, by number, in up to `workers` processes; in the current one if one suffices.

    The descriptor `lock` holds the folder's lock. The processes hold it too: otherwise a process that briefly outlives
    this one could remove the next one's files. Raises a part's first error, or UserError if a process dies; complete
    shards stay.
    """
    if min(workers, len(parts)) <= 1:
        for number, part in parts.items():
            tokenize_part_into_shard(folder, number, part, tokenizer, partial(progress.add_batch, number))
            progress.finish_part(number)
        return
    from drawloom.components.data.store.processes import tokenize_in_processes

    tokenize_in_processes(folder, parts, tokenizer, min(workers, len(parts)), progress, lock)


PLAN = "plan.json"
POLL = 0.1  # seconds between attempts to lock a folder
WAITING_INTERVAL = 60.0  # seconds between messages of a waiting process

log = logging.getLogger("drawloom.data")

Say = Callable[[str], None]


def build_store(
    folder: Path,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    say: Say = log.info,
    report_interval: float = 10,
) -> Store:
    """
    Write the token store for these parts, or complete it, and return it; other processes wait meanwhile.

    `tokenizer` is open; `say` receives the progress every `report_interval` seconds. Raises UserError if the folder
    has other content.
    """
    plan = make_store_plan(parts, tokenizer)
    with create_and_lock_folder(folder, say) as lock:
        try:
            if not _is_complete_store(folder, plan):
                _write_missing_shards_and_index(
                    folder, lock, plan, parts, tokenizer, workers=workers, say=say, report_interval=report_interval
                )
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            raise UserError(
                f"{folder}: the token store can't be written ({reason}); solve this, and run the command again: "
                "complete shards are kept"
            ) from error
    return Store.open(folder)


def make_store_plan(parts: Sequence[Part], tokenizer: Tokenizer) -> dict[str, Any]:
    """
    Return a store's plan: digests for parts and tokenizer, and the ids' range and dtype. Equal input has equal plans.
    """
    inputs = hashlib.sha256()
    for part in parts:
        inputs.update(f"{part!r}\n".encode("utf-8", "surrogatepass"))
    return {
        "format": FORMAT,
        "inputs": inputs.hexdigest(),
        "tokenizer": hash_tokenizer(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "prefix_ids": [*tokenizer.prefix_ids],
        "dtype": np.dtype(choose_id_dtype(tokenizer.vocab_size)).name,
        "parts": len(parts),
    }


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Hash a tokenizer's saved files, and the ids that it adds to a document, with SHA-256."""
    added = [*tokenizer.prefix_ids], [*tokenizer.suffix_ids], tokenizer.eos_id
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {added}\n".encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            digest.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def create_and_lock_folder(folder: Path, say: Say) -> Iterator[int]:
    """Create a folder, and wait until no other process writes to it; yields the lock's descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({error.strerror}); choose another folder") from error
    try:
        last_message = -math.inf
        while not _try_lock(descriptor):
            if time.monotonic() - last_message >= WAITING_INTERVAL:
                say(f"waiting for the process that tokenizes into {folder}")
                last_message = time.monotonic()
            time.sleep(POLL)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file without waiting, and return whether this succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_complete_store(folder: Path, plan: dict[str, Any]) -> bool:
    """Return whether a complete store with this plan exists. Raises UserError for another store, or for other files."""
    for name, read in ((STORE, read_index), (PLAN, _read_plan)):
        path = folder / name
        if path.is_file():
            stored = read(path)
            if changed := [key for key in plan if stored.get(key) != plan[key]]:
                difference = {"inputs": "files", "parts": "files"}.get(changed[0], changed[0])
                raise UserError(
                    f"{folder} holds a store of other {difference}; choose another folder, or remove this one", 2
                )
            return name == STORE
    if set(os.listdir(folder)) - {LOCK, f".{PLAN}.tmp"}:  # a process killed while it wrote the plan leaves both
        raise UserError(f"{folder} holds other files; choose a new folder", 2)
    return False


def _read_plan(path: Path) -> dict[str, Any]:
    """Return an unfinished store's plan. Raises UserError if it is damaged."""
    try:
        plan: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove {path.parent}, and make the store anew") from error
    return plan


def _write_missing_shards_and_index(
    folder: Path,
    lock: int,
    plan: dict[str, Any],
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    *,
    workers: int,
    say: Say,
    report_interval: float,
) -> None:
    """Write the missing shards, followed by `store.json`."""
    if not (folder / PLAN).exists():
        replace_file(folder / PLAN, (json.dumps(plan) + "\n").encode())
    missing = {number: part for number, part in enumerate(parts) if not _is_complete_shard(folder, number, plan)}
    sizes = {number: part.byte_count for number, part in missing.items()}
    complete = sum(part.byte_count for part in parts) - sum(sizes.values())
    tokenize_parts_into_shards(
        folder, missing, tokenizer, workers, Progress(sizes, complete, say, report_interval), lock
    )
    shards = [_open_shard(folder, number, plan) for number in range(len(parts))]
    counts = [[shard.documents, shard.tokens, shard.digest] for shard in shards]
    replace_file(
        folder / STORE, encode_index_with_digest({**plan, "fingerprint": hash_documents(shards), "shards": counts})
    )
    (folder / PLAN).unlink()


def _open_shard(folder: Path, number: int, plan: dict[str, Any]) -> TokenShard:
    """Return a complete shard, as its JSON file describes it."""
    return TokenShard.open_from_json(get_shard_stem(folder, number), np.dtype(plan["dtype"]).newbyteorder("<"))


def _is_complete_shard(folder: Path, number: int, plan: dict[str, Any]) -> bool:
    """Return whether a shard is complete, and its files have the right sizes."""
    if not get_shard_stem(folder, number).with_suffix(".json").is_file():
        return False
    try:
        _open_shard(folder, number, plan).check_file_sizes()
    except UserError:
        return False
    return True
