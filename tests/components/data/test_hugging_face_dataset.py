"""A corpus in a folder of Hugging Face's `datasets`."""

from pathlib import Path

import pytest

from drawloom.components.data.hugging_face_dataset import HuggingFaceDataset
from drawloom.graph import UserError
from support.stores import write_dataset


def test_splits_come_from_the_data_sets(tmp_path: Path) -> None:
    """With a data set for validation both are whole; without one the training data is divided."""
    write_dataset(tmp_path / "saved", "text")
    whole = HuggingFaceDataset(path=tmp_path / "saved", validation="test")
    train = [f"train {rows} text {number}" for rows in (12, 8) for number in range(rows)]
    assert list(whole.documents("train")) == train
    assert list(whole.documents("validation")) == [f"test 5 text {number}" for number in range(5)]
    divided = HuggingFaceDataset(path=tmp_path / "saved", validation_fraction=0.3)
    split_documents = [list(divided.documents(split)) for split in ("train", "validation")]
    assert sorted(split_documents[0] + split_documents[1]) == sorted(train) and all(split_documents)


def test_a_single_data_set_needs_no_name(tmp_path: Path) -> None:
    """A folder with one data set has no split names."""
    write_dataset(tmp_path / "saved", "text")
    corpus = HuggingFaceDataset(path=tmp_path / "saved" / "test", validation_fraction=0.0, field="other")
    assert list(corpus.documents("train")) == ["0", "1", "2", "3", "4"]
    with pytest.raises(UserError, match="holds one data set"):
        list(HuggingFaceDataset(path=tmp_path / "saved" / "test", validation="test").documents("train"))


def test_a_missing_data_set_is_named(tmp_path: Path) -> None:
    """A folder without a data set, and an unknown name in one, are errors."""
    with pytest.raises(UserError, match="is not a data set: it has no state"):
        list(HuggingFaceDataset(path=tmp_path).documents("train"))
    write_dataset(tmp_path / "saved", "text")
    with pytest.raises(UserError, match='has no "dev", only train, test'):
        list(HuggingFaceDataset(path=tmp_path / "saved", validation="dev").documents("validation"))
    (tmp_path / "saved" / "dataset_dict.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_dict\.json can't be read"):
        list(HuggingFaceDataset(path=tmp_path / "saved").documents("train"))
