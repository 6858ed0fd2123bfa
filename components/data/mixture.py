"""Weighted mixture for tokenized corpora."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import inf
from typing import Any

import attrs
import numpy as np

from drawloom import Problem, UserError, above, component, internal, setting
from drawloom.graph.problems import did_you_mean
from drawloom.ports import DocumentPart, Split, TokenCorpus, TokenDocuments


@attrs.frozen(eq=False)
class DocumentSource:
    """One source's documents; `weight` is its relative share of the training tokens."""

    name: str
    documents: TokenDocuments
    weight: float


@attrs.frozen(eq=False)
class MixedDocuments:
    """Concatenated TokenDocuments from several sources."""

    sources: tuple[DocumentSource, ...]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Token counts by document, (documents,)."""
        lengths: np.ndarray = np.concatenate([source.documents.lengths for source in self.sources])
        return lengths

    @property
    def fingerprint(self) -> str:
        """Digest over all sources and their names, without their weights."""
        parts = [f"{source.name} {source.documents.fingerprint}\n" for source in self.sources]
        return sha256("".join(parts).encode()).hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        source, number = self._find_source_and_document_number(document)
        return source.documents.read(number, first, end)

    def describe_origin(self, document: int) -> str:
        """Return the source's name, and the document's origin in it."""
        source, number = self._find_source_and_document_number(document)
        return f"{source.name}: {source.documents.describe_origin(number)}"

    @cached_property
    def _first_document_by_source(self) -> list[int]:
        """First document numbers by source, followed by the total document count."""
        return [0, *accumulate(len(source.documents.lengths) for source in self.sources)]

    def _find_source_and_document_number(self, document: int) -> tuple[DocumentSource, int]:
        """Return a document's source, and its number there."""
        index = bisect_right(self._first_document_by_source, document) - 1
        return self.sources[index], document - self._first_document_by_source[index]


def list_document_sources(documents: TokenDocuments) -> tuple[DocumentSource, ...]:
    """Return a mixture's sources, or all documents as one source without a name."""
    return documents.sources if isinstance(documents, MixedDocuments) else (DocumentSource("", documents, 1.0),)


@component
class Mixture:
    """
    Documents from several sources; packings keep the sources in separate rows.

    A source's share of the tokens is proportional to its weight, or without weights to (epochs * tokens) ** (1 /
    temperature). Rows from all sources are interleaved, so the shares hold in every part of a run
    (`components/data/order/stream.py`); an exhausted source begins its next epoch.
    """

    sources: dict[str, TokenCorpus]
    weights: dict[str, float] = setting("relative share of training tokens by source, in any unit", factory=dict)
    epochs: dict[str, float] = setting("relative epoch count by source; default: 1", factory=dict)
    temperature: float = setting(
        "sampling temperature; above 1, small sources get a larger share than their size", default=1.0, check=above(0)
    )
    _mixed: dict[Split, MixedDocuments] = internal(factory=dict)

    def check_before_open(self) -> None:
        """Raise UserError if two sources have different vocabularies."""
        first, *others = self.sources
        for other in others:
            corpora = (self.sources[first], self.sources[other])
            ids, other_ids = ((corpus.vocab_size, corpus.eos_id) for corpus in corpora)
            if ids != other_ids:
                raise UserError(
                    f"sources: {first} has {ids[0]} token ids and the end token {ids[1]}, but {other} has "
                    f"{other_ids[0]} and {other_ids[1]}; tokenize both with one tokenizer",
                    exit_code=2,
                )

    def close(self) -> None:
        """Free the documents."""
        self._mixed.clear()

    @property
    def vocab_size(self) -> int:
        """The sources' common vocabulary size."""
        return next(iter(self.sources.values())).vocab_size

    @property
    def eos_id(self) -> int:
        """The sources' common end token."""
        return next(iter(self.sources.values())).eos_id

    def documents(self, split: Split) -> MixedDocuments:
        """Return all sources' concatenated documents."""
        if split not in self._mixed:
            sources = []
            for name, corpus in self.sources.items():
                documents = corpus.documents(split)
                tokens = float(documents.lengths.sum(dtype=np.int64))
                sources.append(DocumentSource(name, documents, self._compute_source_weight(name, tokens)))
            self._mixed[split] = MixedDocuments(tuple(sources))
        return self._mixed[split]

    def _compute_source_weight(self, name: str, token_count: float) -> float:
        """Return a source's weight: the setting, or (epochs * tokens) ** (1 / temperature)."""
        if self.weights:
            return self.weights[name]
        weight: float = (self.epochs.get(name, 1.0) * token_count) ** (1 / self.temperature)
        return weight

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Yield problems with weights, epochs and temperature, such as unknown sources or missing weights."""
        names, weights = node.edge_keys("sources"), node.settings["weights"]
        if not names:
            yield node.problem("sources", "a mixture without sources", 'write sources = { name = "@node", ... }')
        for key in ("weights", "epochs"):
            for name, value in node.settings[key].items():
                if name not in names:
                    hint = did_you_mean(name, names)
                    yield node.problem((key, name), f"{key}.{name}: sources has no {name!r}", hint)
                elif not 0 <= value < inf:
                    yield node.problem(
                        (key, name), f"{key}.{name}: {value} is negative or not finite", "write a number from 0 on"
                    )
        if weights and (missing := [name for name in names if name not in weights]):
            text = f"weights leaves out {' and '.join(missing)}"
            yield node.problem("weights", text, f"write weights.{missing[0]}, which may be 0")
        if weights and (node.settings["epochs"] or node.settings["temperature"] != 1):
            text = "weights are the shares themselves, so epochs and temperature have no effect"
            yield node.problem("weights", text, "leave out weights, or the others")
        if weights and not any(weights.values()):
            yield node.problem("weights", "no source has a share above 0", "write a weight above 0 for one")
