"""Mixtures: shares, validation, and refused settings."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from drawloom.components.data.mixture import Mixture
from drawloom.components.data.packing.padded import Padded
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.corpus import TokenCorpus
from drawloom.graph import UserError
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.tokens_in_memory import TokensInMemory

SOURCES: dict[str, TokenCorpus] = {
    "web": TokensInMemory([[1] * 8, [1] * 8], [[1, 1]]),
    "code": TokensInMemory([[2] * 4] * 4, [[2, 2], [2, 2, 2]]),
}


def weights_of(**settings: Any) -> dict[str, float]:
    mixture = Mixture(sources=SOURCES, **settings)
    return {source.name: source.weight for source in mixture.documents("train").sources}


def test_shares_follow_from_weights_epochs_or_temperature() -> None:
    """Weights are used unchanged; epochs multiply the 16 tokens in a source; a temperature flattens the shares."""
    assert weights_of(weights={"web": 30, "code": 70}) == {"web": 30, "code": 70}
    assert weights_of(epochs={"code": 2.5}) == {"web": 16, "code": 40}
    assert weights_of(epochs={"web": 0.0}, temperature=2.0) == {"web": 0, "code": 4}


def test_rows_are_of_one_source_each(job: Any) -> None:
    """A packing numbers one source's rows after another's, in both splits, and names their sources."""
    mixture = Mixture(sources=SOURCES, weights={"web": 1, "code": 2})
    rows = Padded(tokens=mixture, job=job, length=6)
    rows.open()
    row_sources = [
        (source.name, source.first, source.rows, source.tokens, source.weight) for source in rows.row_sources("train")
    ]
    assert row_sources == [("web", 0, 4, 16, 1), ("code", 4, 4, 16, 2)]
    assert rows.tokens_per_row("train").tolist() == [6, 6, 2, 2, 4, 4, 4, 4]
    batch = rows.batch("train", range(8))
    assert batch.tokens[:, 0].tolist() == [1] * 4 + [2] * 4
    assert rows.describe_row_origins("train", 7)[0].startswith("code: document ")
    assert [(source.name, source.rows) for source in rows.row_sources("validation")] == [("web", 1), ("code", 2)]
    assert rows.batch("validation", [2]).tokens.tolist() == [[2, 2, 2, 0, 0, 0]]


def test_a_mixture_has_the_documents_of_its_sources() -> None:
    """Their number, lengths and tokens are the sources'; the fingerprint depends on the sources, not on the weights."""
    one, other = Mixture(sources=SOURCES, weights={"web": 1, "code": 0}), Mixture(sources=SOURCES)
    documents = one.documents("train")
    assert documents.lengths.tolist() == [8, 8, 4, 4, 4, 4]
    assert [documents.read(number, 0, 3).ids.tolist() for number in (1, 2)] == [[1, 1, 1], [2, 2, 2]]
    assert documents.fingerprint == other.documents("train").fingerprint
    swapped = Mixture(sources={"web": SOURCES["code"], "code": SOURCES["web"]})
    assert documents.fingerprint != swapped.documents("train").fingerprint


class Weighted(TokensInMemory):
    """Documents with weights."""

    def documents(self, split: Any) -> TokenArrays:
        return TokenArrays.concatenate([np.array([3, 3])], np.uint32, [np.array([0.5, 0.25], np.float32)])


def test_weights_of_tokens_are_kept() -> None:
    """A source with weights keeps them beside one without."""
    documents = Mixture(sources={**SOURCES, "chat": Weighted([], [])}).documents("train")
    weights = documents.read(6, 0, 2).weights
    assert documents.read(0, 0, 2).weights is None and weights is not None and weights.tolist() == [0.5, 0.25]


def test_sources_of_two_tokenizers_are_refused() -> None:
    """Their numbers of ids, and their ends, are named."""
    mixture = Mixture(sources={**SOURCES, "other": TokensInMemory([], [], vocab_size=50, eos_id=1)})
    with pytest.raises(UserError, match="web has 100000 token ids and the end token 0, but other has 50 and 1"):
        mixture.check_before_open()


def problems(**settings: Any) -> Counter[str]:
    source = {"use": "data.tokenized", "path": "store"}
    tokens = {"use": "data.mixture", "sources": {"web": source, "code": source}, **settings}
    recipe = Recipe.load("first_run").with_values({"tokens": tokens})
    with pytest.raises(RecipeError) as error:
        recipe.check(skip_machine_checks=True)
    return Counter(f"{problem.text}; {problem.hint}" for problem in error.value.problems if not problem.warning)


def test_check_finds_wrong_shares() -> None:
    """Names without a source, sources without a weight, impossible shares, and duplicate shares are problems."""
    assert problems(weights={"web": 1.0, "cod": 1.0}).keys() == {
        "weights.cod: sources has no 'cod'; did you mean 'code'?",
        "weights leaves out code; write weights.code, which may be 0",
    }
    assert problems(epochs={"web": -1.0}).keys() == {
        "epochs.web: -1.0 is negative or not finite; write a number from 0 on"
    }
    assert problems(weights={"web": 1.0, "code": 2.0}, temperature=2.0).keys() == {
        "weights are the shares themselves, so epochs and temperature have no effect; leave out weights, or the others"
    }
    assert problems(weights={"web": 0.0, "code": 0.0}).keys() == {
        "no source has a share above 0; write a weight above 0 for one"
    }
