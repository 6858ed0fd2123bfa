"""Documents tokenized by Megatron-LM."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.data.megatron import Megatron
from drawloom.graph import UserError
from support.stores import write_megatron

DOCUMENTS = [[number, 2, 65_535, 0][: 1 + number % 4] for number in range(40)]


def corpus(folder: Path, **settings: Any) -> Megatron:
    made = Megatron(path=folder / "data_text_document", vocab_size=65_536, eos_id=0, **settings)
    made.check_before_open()
    return made


def test_documents_are_read_as_they_are(tmp_path: Path) -> None:
    """Ids, lengths and order equal the files', in both splits together, and after pickling."""
    write_megatron(tmp_path / "data_text_document", DOCUMENTS)
    ids_by_document = {}
    for split in ("train", "validation"):
        documents = pickle.loads(pickle.dumps(corpus(tmp_path, validation_fraction=0.3).documents(split)))
        for number, length in enumerate(documents.lengths.tolist()):
            ids_by_document[int(documents.chosen[number])] = documents.read(number, 0, length + 9).ids.tolist()
            assert documents.read(number, 0, length).weights is None
    assert ids_by_document == dict(enumerate(DOCUMENTS))
    assert 4 < len(corpus(tmp_path, validation_fraction=0.3).documents("validation").lengths) < 20
    assert corpus(tmp_path).documents("train").describe_origin(0).startswith(f"{tmp_path}/data_text_document.bin:")


def test_an_empty_data_set_has_no_documents(tmp_path: Path) -> None:
    """Files without a document are opened."""
    write_megatron(tmp_path / "data_text_document", [])
    assert len(corpus(tmp_path).documents("train").lengths) == 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A missing file, another format, and a truncated file are errors naming the file."""
    with pytest.raises(UserError, match=r"data_text_document\.idx can't be read"):
        corpus(tmp_path)
    write_megatron(tmp_path / "data_text_document", DOCUMENTS)
    tokens, index = (tmp_path / f"data_text_document.{end}" for end in ("bin", "idx"))
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"\.bin is cut off"):
        corpus(tmp_path)
    index.write_bytes(index.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"\.idx has \d+ bytes"):
        corpus(tmp_path)
    index.write_bytes(b"something else, and long enough to be read")
    with pytest.raises(UserError, match="is not an index file of Megatron-LM"):
        corpus(tmp_path)


def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    """A wrong `vocab_size` is an error with the ids, and no index error of the embedding, or of a GPU."""
    write_megatron(tmp_path / "data_text_document", [[1, 2, 7]])
    made = Megatron(path=tmp_path / "data_text_document", vocab_size=7, eos_id=0, validation_fraction=0.0)
    made.check_before_open()
    documents = made.documents("train")
    assert documents.read(0, 0, 2).ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="its ids are from 1 to 7, and vocab_size is 7"):
        documents.read(0, 0, 3)
