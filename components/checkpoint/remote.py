"""Copies of a run folder in an object store: checkpoints with their manifests last, metrics, recipe and report."""

from collections.abc import Mapping
from pathlib import Path

import attrs

from drawloom import UserError
from drawloom.components.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    STEP,
    CorruptCheckpointError,
    list_checkpoints,
    step_of_checkpoint,
)
from drawloom.components.checkpoint.reader import read_manifest_if_sizes_match, verify_checkpoint
from drawloom.components.storage.object_store import ObjectStore, StoreError
from drawloom.graph.recipe.lockfile import LOCK

SMALL_FILES = (LOCK, "metrics.jsonl", "sample.txt", "report.html", "log/environment.json")
"""Files that are copied when they have changed."""
NEEDED_FILES = (LOCK, "metrics.jsonl")
"""Files that a resumed run reads beside the checkpoint."""

Stamp = tuple[int, int]


@attrs.define
class RemoteCopy:
    """Copy of one run folder; `upload_changes_and_prune` brings it up to date, and `fetch_checkpoint` reads it."""

    store: ObjectStore
    _stamps: dict[str, Stamp] = attrs.field(factory=dict)
    _copied: set[str] = attrs.field(factory=set)

    def is_behind(self, run: Path) -> bool:
        """Return whether a checkpoint of the run is not copied; reads no file and asks no store."""
        return any(path.name not in self._copied for path in list_checkpoints(run / FOLDER))

    def upload_changes_and_prune(self, run: Path) -> None:
        """
        Copy new checkpoints and changed files, and remove checkpoints no longer in the run.

        A checkpoint's manifest is written last and removed first, so a checkpoint with a manifest is whole. Raises
        StoreError if the store fails; a later call goes on.
        """
        remote = {name for name in self.store.list_names(FOLDER) if STEP.fullmatch(name)}
        whole = {
            name for name in remote if name in self._copied or MANIFEST in self.store.list_names(f"{FOLDER}/{name}")
        }
        self._copied = whole
        for checkpoint in list_checkpoints(run / FOLDER):
            if checkpoint.name not in whole:
                self._upload_checkpoint(checkpoint)
        for name in SMALL_FILES:
            self._upload_if_modified(run / name, name)
        local = {path.name for path in list_checkpoints(run / FOLDER)}
        for name in remote - local if local else ():
            self.store.remove(f"{FOLDER}/{name}/{MANIFEST}")
            self.store.remove(f"{FOLDER}/{name}")
            self._copied.discard(name)

    def fetch_checkpoint(self, run: Path, step: int | None = None) -> int:
        """
        Copy the newest whole checkpoint, or that of a step, into a run folder, and return its step; 0 without one.

        The copy is verified by the digests of its manifest; a damaged one is skipped. Raises StoreError if the store
        fails, and UserError if all checkpoints are damaged.
        """
        names = sorted(
            filter(STEP.fullmatch, self.store.list_names(FOLDER)), key=lambda name: step_of_checkpoint(Path(name))
        )
        faults: Mapping[str, str] = {}
        for name in reversed(names):
            if step in (None, step_of_checkpoint(Path(name))) and MANIFEST in self.store.list_names(f"{FOLDER}/{name}"):
                if not (fault := self._download_checkpoint_and_find_fault(run, name)):
                    for file in NEEDED_FILES:
                        if file in self.store.list_names():
                            self.store.download(file, run / file)
                    return step_of_checkpoint(Path(name))
                faults = {**faults, name: fault}
        if faults:
            listed = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
            raise UserError(f"{self.store.url} has only damaged checkpoints: {listed}")
        return 0

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        manifest = read_manifest_if_sizes_match(checkpoint)
        if manifest is None:
            return  # corrupt, or just removed
        try:
            for name in (*manifest.files, MANIFEST):
                self.store.upload(checkpoint / name, f"{FOLDER}/{checkpoint.name}/{name}")
        except FileNotFoundError:  # the run has removed the checkpoint meanwhile
            self.store.remove(f"{FOLDER}/{checkpoint.name}")
            return
        self._copied.add(checkpoint.name)

    def _upload_if_modified(self, file: Path, name: str) -> None:
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._stamps.get(name) != stamp:
                self.store.upload(file, name)
                self._stamps[name] = stamp
        except FileNotFoundError:
            return

    def _download_checkpoint_and_find_fault(self, run: Path, name: str) -> str:
        """Download and verify a checkpoint, and return its fault; a damaged copy is removed."""
        temporary = run / FOLDER / f".tmp-{name}" / name  # the run removes leftovers of this name
        for file in self.store.list_names(f"{FOLDER}/{name}"):
            self.store.download(f"{FOLDER}/{name}/{file}", temporary / file)
        try:
            verify_checkpoint(temporary)
        except CorruptCheckpointError as error:
            return str(error)
        temporary.rename(run / FOLDER / name)
        temporary.parent.rmdir()
        return ""


def fetch_run(url: str, folder: Path, step: int | None = None) -> None:
    """Copy a run from a store into an empty folder. Raises UserError if the store fails or has no such checkpoint."""
    try:
        fetched_step = RemoteCopy(ObjectStore.open(url)).fetch_checkpoint(folder, step)
    except StoreError as error:
        raise UserError(f"{error}; check the URL and the credentials of the store", 2) from error
    if not fetched_step:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{url} has {which}; give the mirror of a run", 2)
