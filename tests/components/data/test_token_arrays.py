"""Documents of token ids in memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from drawloom.components.data import token_arrays
from drawloom.components.data.bytes import Bytes
from drawloom.components.data.store.store import choose_id_dtype
from drawloom.components.data.token_arrays import TokenArrays, tokenize_split
from drawloom.components.ports.corpus import Split


def arrays(*documents: list[int], weights: list[list[float]] | None = None) -> TokenArrays:
    own = None if weights is None else [np.array(document_weights, np.float32) for document_weights in weights]
    return TokenArrays.concatenate([np.array(document) for document in documents], np.uint16, own)


def test_parts_of_documents_stay_inside_of_them() -> None:
    """A part equals the same part in the whole document, and ends with it; weights follow."""
    token_arrays = arrays([1, 2, 3], [], [4, 5], weights=[[0.0, 1.0, 2.0], [], [3.0, 4.0]])
    assert token_arrays.lengths.tolist() == [3, 0, 2]
    assert token_arrays.read(0, 1, 9).ids.tolist() == [2, 3] and token_arrays.read(2, 0, 1).ids.tolist() == [4]
    weights = token_arrays.read(0, 1, 9).weights
    assert weights is not None and weights.tolist() == [1.0, 2.0]
    assert arrays([1]).read(0, 0, 1).weights is None


def test_the_fingerprint_is_of_everything() -> None:
    """Another id, border or weight gives another fingerprint; the same documents the same."""
    same = [arrays([1, 2], [3]), arrays([1, 2], [3])]
    others = [arrays([1, 2, 3]), arrays([1, 2], [4]), arrays([1, 2], [3], weights=[[1.0, 1.0], [1.0]])]
    others.append(arrays([1, 2], [3], weights=[[1.0, 1.0], [0.5]]))
    assert len({token_arrays.fingerprint for token_arrays in same}) == 1
    assert len({token_arrays.fingerprint for token_arrays in [same[0], *others]}) == 5


def test_references_and_labels_have_different_fingerprints() -> None:
    """Equal numbers for different uses are different data."""
    documents = [np.array([1, 2])]
    references = TokenArrays.concatenate(documents, np.uint16, references=[1.0])
    assert references.fingerprint != TokenArrays.concatenate(documents, np.uint16, labels=[1.0]).fingerprint


@pytest.mark.parametrize(("size", "width"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_ids_have_the_least_width(size: int, width: int) -> None:
    """Two bytes up to 65,536 ids, else four."""
    assert np.dtype(choose_id_dtype(size)).itemsize == width


def test_a_corpus_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While documents come, warnings say who yields them, and how data without an end is read."""

    class Endless:
        def documents(self, split: Split) -> Iterator[str]:
            yield from ("one", "two")
            assert "Endless.documents('train') has yielded 2 items" in caplog.text
            assert "write a component with `next_step` for [data]" in caplog.text

    monkeypatch.setattr(token_arrays, "WARN_SECONDS", 0.0)
    assert len(tokenize_split(Endless(), Bytes(), "train").lengths) == 2


def test_an_empty_corpus_has_no_documents() -> None:
    """No documents make empty arrays."""
    assert arrays().lengths.tolist() == []
