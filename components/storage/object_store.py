"""Folders in an object store, such as s3://bucket/folder, through fsspec."""

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError

MISSING = "install its reader: pip install 'drawloom[fsspec]', and the protocol's package, such as s3fs"


class StoreError(Exception):
    """A store can't be reached, or refuses an operation."""


@attrs.frozen
class ObjectStore:
    """
    A folder in a store. Methods take names relative to it, and raise StoreError for every failure of the store.

        store = ObjectStore.open("s3://bucket/runs/first_run")
        store.upload(Path("runs/first_run/metrics.jsonl"), "metrics.jsonl")
    """

    url: str
    _system: Any
    _root: str

    @classmethod
    def open(cls, url: str) -> "ObjectStore":
        """Return the store for a URL. Raises UserError if fsspec or the protocol's package is missing."""
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"{url}: the package `fsspec` is missing; {MISSING}") from error
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}; {MISSING}") from error
        return cls(url, system, root)

    def list_names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; empty if it is missing."""
        with self._convert_to_store_errors():
            self._system.invalidate_cache()
            try:
                paths = self._system.ls(self._join_path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({posixpath.basename(str(path).rstrip("/")) for path in paths} - {""})

    def upload(self, file: Path, name: str) -> None:
        """Upload a local file under a name. Raises FileNotFoundError if the local file is gone."""
        if not file.is_file():
            raise FileNotFoundError(file)
        with self._convert_to_store_errors():
            self._system.makedirs(posixpath.dirname(self._join_path(name)), exist_ok=True)
            self._system.put_file(str(file), self._join_path(name))

    def download(self, name: str, file: Path) -> None:
        """Download a file, and create the local folder for it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._convert_to_store_errors():
            self._system.get_file(self._join_path(name), str(file))

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        with self._convert_to_store_errors():
            if self._system.exists(self._join_path(name)):
                self._system.rm(self._join_path(name), recursive=True)

    def _join_path(self, name: str) -> str:
        """Return a name's path in fsspec's file system."""
        return posixpath.join(self._root, name) if name else self._root

    @contextmanager
    def _convert_to_store_errors(self) -> Iterator[None]:
        """Convert every exception to StoreError, because stores and their packages raise many kinds."""
        try:
            yield
        except Exception as error:
            raise StoreError(f"{self.url}: {type(error).__name__}: {error}") from error
