"""Documents of text as token ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.store import build
from drawloom.components.data.text_files import TextFiles
from drawloom.components.data.tokenized_text import TokenizedText
from drawloom.components.ports.corpus import Split


@attrs.frozen
class Texts:
    """A corpus in memory."""

    train: list[str]
    validation: list[str] = attrs.field(factory=list)

    def documents(self, split: Split) -> Iterator[str]:
        return iter(self.train if split == "train" else self.validation)


@attrs.frozen
class Wide(Bytes):
    """A tokenizer with any number of ids, whose texts are written as ids."""

    size: int
    eos_id: int = 0

    @property
    def vocab_size(self) -> int:
        return self.size

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]


def tokens_of(corpus: TokenizedText, split: Any) -> list[list[int]]:
    documents = corpus.documents(split)
    return [documents.read(number, 0, int(length)).ids.tolist() for number, length in enumerate(documents.lengths)]


def test_documents_end_with_the_end(drawloom_opened: Any, job: Any) -> None:
    """Each document is followed by the end; empty ones are dropped, and splits are apart."""
    corpus = drawloom_opened(TokenizedText(corpus=Texts(["", "abc", "", "d"], ["ef"]), tokenizer=Bytes(), job=job))
    assert tokens_of(corpus, "train") == [[*b"abc", 256], [*b"d", 256]]
    assert tokens_of(corpus, "validation") == [[*b"ef", 256]]
    assert (corpus.vocab_size, corpus.eos_id) == (257, 256)


@pytest.mark.parametrize("vocabulary", [65_536, 65_537, 200_000])
def test_the_highest_id_survives(drawloom_opened: Any, job: Any, vocabulary: int) -> None:
    """A vocabulary's last id is kept, below and above the limit of two bytes."""
    corpus = drawloom_opened(
        TokenizedText(corpus=Texts([f"1 {vocabulary - 1} 2"]), tokenizer=Wide(vocabulary), job=job)
    )
    assert tokens_of(corpus, "train") == [[1, vocabulary - 1, 2, 0]]


def test_files_are_tokenized_once(
    drawloom_opened: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run with the same files finds the stores beside the run folder; a changed file is tokenized."""
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    job = attrs.evolve(job, folder_path=tmp_path / "runs" / "one")

    def run(**settings: Any) -> TokenizedText:
        corpus = TextFiles(paths=[f"{tmp_path}/*.txt"], validation_fraction=0.3)
        made: TokenizedText = drawloom_opened(TokenizedText(corpus=corpus, tokenizer=Bytes(), job=job, **settings))
        return made

    first = run()
    texts = [bytes(ids[:-1]).decode() for split in ("train", "validation") for ids in tokens_of(first, split)]
    assert sorted(texts) == sorted(f"text {number}" for number in range(20))
    stores = sorted((tmp_path / "runs" / ".tokens").iterdir())
    assert len(stores) == 2
    with monkeypatch.context() as patch:
        patch.setattr(build, "tokenize_parts_into_shards", lambda *arguments: pytest.fail("tokenized again"))
        assert tokens_of(run(), "train") == tokens_of(first, "train")
    (tmp_path / "3.txt").write_text("text X")
    run()
    assert len(sorted((tmp_path / "runs" / ".tokens").iterdir())) == 4
    run(cache=tmp_path / "mine")
    assert len(sorted((tmp_path / "mine").iterdir())) == 2
