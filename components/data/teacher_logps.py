"""A teacher's stored predictions, as `drawloom teacher-logps` writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drawloom import UserError, component, internal, setting, wired
from drawloom.components.weights.token_ids import read_tokenizer_ids
from drawloom.ports import Split, Tokenizer

MANIFEST = "teacher.json"


@component
class TeacherLogps:
    """
    A teacher's likeliest tokens at every position, from a folder that `drawloom teacher-logps` has written.

    Files are mapped into memory. The rows must be those that the teacher has seen: the same documents, tokenizer,
    packing and seed.
    """

    tokenizer: Tokenizer | None = wired(default=None)
    path: Path = setting("folder that `drawloom teacher-logps` has written")
    _manifest: Mapping[str, Any] = internal(factory=dict)
    _files: dict[Split, tuple[np.ndarray, np.ndarray]] = internal(factory=dict)

    def check_before_open(self) -> None:
        """Read the manifest. Raises UserError if there is none, or if the tokenizer has other ids."""
        written, ids = self.manifest()["tokenizer"], self.tokenizer and read_tokenizer_ids(self.tokenizer)
        if written and ids and written != ids.fingerprint:
            text = f"path: {self.path} was written with another tokenizer, in which tokens have other ids"
            raise UserError(f"{text}; run `drawloom teacher-logps` with this tokenizer, and a teacher that has it")

    def manifest(self) -> Mapping[str, Any]:
        """
        Return the manifest: the rows' identity (`rows`), `length`, `top_k`, and a digest of token ids (`tokenizer`).

        Raises UserError if it is unreadable.
        """
        if not self._manifest:
            try:
                self._manifest = json.loads((self.path / MANIFEST).read_text("utf-8"))
            except (OSError, ValueError) as error:
                text = f"path: {self.path} has no teacher predictions ({error})"
                raise UserError(f"{text}; write them with `drawloom teacher-logps`") from error
        return self._manifest

    def check_written_for_rows(self, identity: Mapping[str, Any]) -> None:
        written = self.manifest()["rows"]
        if different := [name for name in {**written, **identity} if written.get(name) != identity.get(name)]:
            name = different[0]
            there, here = written.get(name), identity.get(name)
            text = f"path: {self.path} was written for other rows: {name} is {there} there, and {here} here"
            raise UserError(
                f"{text}; use the same documents, tokenizer, packing, length and seed as `drawloom teacher-logps`"
            )

    def read_top_ids_and_logps(self, split: Split, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        if split not in self._files:
            shape = -1, self.manifest()["length"], self.manifest()["top_k"]
            ids = np.memmap(self.path / f"{split}.ids", np.int32, "r").reshape(shape)
            logps = np.memmap(self.path / f"{split}.logps", np.float16, "r").reshape(*shape[:2], shape[2] + 1)
            self._files[split] = ids, logps
        ids, logps = self._files[split]
        rows = list(indices)
        return ids[rows].astype(np.int64), logps[rows].astype(np.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need; each maps the files itself."""
        return {**self.__dict__, "tokenizer": None, "_files": {}}
