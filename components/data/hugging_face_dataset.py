"""Corpus in a folder written by `save_to_disk` from Hugging Face's `datasets`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drawloom import UserError, component, setting
from drawloom.components.data.sources.documents import DividedCorpus, Part, iterate_texts, validation_fraction
from drawloom.components.data.sources.files import stat_local_file
from drawloom.components.data.sources.formats import ArrowPart
from drawloom.ports import Split


@component(needs={"pyarrow": "drawloom[arrow]"})
class HuggingFaceDataset(DividedCorpus):
    """
    A saved dataset, or a dictionary with several, with one text column.

    Without a validation dataset, a document's split depends only on its text.
    """

    path: Path = setting("dataset folder, relative to the current directory")
    field: str = setting("text column's name", default="text")
    train: str = setting("training dataset's name in a dictionary", default="train")
    validation: str | None = setting(
        "validation dataset's name in a dictionary; the training dataset is then used whole", default=None
    )
    validation_fraction: float = validation_fraction("documents")

    def check_before_open(self) -> None:
        """Read every dataset's first document. Raises UserError if a folder or the column is missing."""
        for name in filter(None, (self.train, self.validation)):
            next(iterate_texts(self._list_arrow_files(name)[:1]), None)

    def divide(self) -> Sequence[Part]:
        """Return the training dataset's files. Raises UserError if the folder is not a dataset, or lacks it."""
        return self._list_arrow_files(self.train)

    def parts(self, split: Split) -> Sequence[Part]:
        if self.validation is None:
            return super().parts(split)
        return self._list_arrow_files(self.train if split == "train" else self.validation)

    def _list_arrow_files(self, dataset_name: str) -> list[ArrowPart]:
        """Return a dataset's Arrow files, by its name in the dictionary. Raises UserError if it is missing."""
        names = _read_json_or_none(self.path / "dataset_dict.json")
        if names is None and self.validation is not None:
            raise UserError(
                f"validation: {self.path} holds one data set, not a dictionary with several; leave `validation` out"
            )
        if names is not None and dataset_name not in names["splits"]:
            raise UserError(f'{self.path} has no "{dataset_name}", only {", ".join(names["splits"])}')
        folder = self.path / dataset_name if names is not None else self.path
        state = _read_json_or_none(folder / "state.json")
        if state is None:
            raise UserError(f"path: {folder} is not a data set: it has no state.json; write one with `save_to_disk`")
        files = [entry["filename"] for entry in state["_data_files"]]
        return [ArrowPart(stat_local_file(file, folder / file), self.field) for file in files]


def _read_json_or_none(path: Path) -> Any:
    """Return a JSON file's content, or None if it is missing."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); restore it") from error
