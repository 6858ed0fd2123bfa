"""A mixture of corpora of token ids, each with its share of the tokens that are trained on, and its documents."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import inf
from typing import Any

import attrs
import numpy as np

from drawloom.components.ports.corpus import DocumentPart, Split, TokenCorpus, TokenDocuments
from drawloom.graph import Problem, UserError, above, component, setting
from drawloom.graph.problems import did_you_mean


@attrs.frozen(eq=False)
class DocumentSource:
    """The documents of a source; `weight` is its share of the tokens that are trained on, relative to others."""

    name: str
    documents: TokenDocuments
    weight: float


@attrs.frozen(eq=False)
class MixedDocuments:
    """TokenDocuments of several sources."""

    sources: tuple[DocumentSource, ...]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each document, (documents,)."""
        lengths: np.ndarray = np.concatenate([source.documents.lengths for source in self.sources])
        return lengths

    @property
    def fingerprint(self) -> str:
        """Of the documents of all sources and their names; not of their weights."""
        parts = [f"{source.name} {source.documents.fingerprint}\n" for source in self.sources]
        return sha256("".join(parts).encode()).hexdigest()

    def read(self, document: int, first: int, last: int) -> DocumentPart:
        """Tokens of a document, as its source has them."""
        source, number = self._place(document)
        return source.documents.read(number, first, last)

    def source(self, document: int) -> str:
        """The name of the source, and where the document comes from there."""
        source, number = self._place(document)
        return f"{source.name}: {source.documents.source(number)}"

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(source.documents.lengths) for source in self.sources)]

    def _place(self, document: int) -> tuple[DocumentSource, int]:
        number = bisect_right(self._starts, document) - 1
        return self.sources[number], document - self._starts[number]


def document_sources(documents: TokenDocuments) -> tuple[DocumentSource, ...]:
    """The sources of documents: those of a mixture, or one without a name."""
    return documents.sources if isinstance(documents, MixedDocuments) else (DocumentSource("", documents, 1.0),)


@component
class Mixture:
    """
    The documents of several sources, which a packing keeps in rows of their own.

    A source's share of the tokens is proportional to its weight, or, if no weights are given, to (epochs * tokens) to
    the power of 1 / temperature, where tokens are those that it has. Rows of all sources alternate, so that the shares
    hold in any part of a run (`components/data/order/stream.py`); a source that is used up begins its next epoch.
    """

    sources: dict[str, TokenCorpus]
    weights: dict[str, float] = setting(
        factory=dict, doc="share of the tokens by source, in any unit: fractions, percent, or numbers of tokens"
    )
    epochs: dict[str, float] = setting(
        factory=dict, doc="how often the tokens of a source come, relative to others; 1 for those left out"
    )
    temperature: float = setting(
        default=1.0, check=above(0), doc="above 1 small sources have a larger share than of all tokens"
    )
    _mixed: dict[Split, MixedDocuments] = attrs.field(init=False, factory=dict)

    def check_machine(self) -> None:
        """Raise UserError if two sources have different vocabularies."""
        first, *others = self.sources
        for other in others:
            ids, others_ids = ((each.vocab_size, each.eos_id) for each in (self.sources[first], self.sources[other]))
            if ids != others_ids:
                raise UserError(
                    f"sources: {first} has {ids[0]} token ids, of which {ids[1]} ends a document, and {other} has "
                    f"{others_ids[0]} and {others_ids[1]}; tokenize both with one tokenizer",
                    exit_code=2,
                )

    def close(self) -> None:
        """Free the documents."""
        self._mixed.clear()

    @property
    def vocab_size(self) -> int:
        """That of all sources."""
        return next(iter(self.sources.values())).vocab_size

    @property
    def eos_id(self) -> int:
        """That of all sources."""
        return next(iter(self.sources.values())).eos_id

    def documents(self, split: Split) -> MixedDocuments:
        """The documents of all sources, one source after another."""
        if split not in self._mixed:
            held = {name: corpus.documents(split) for name, corpus in self.sources.items()}
            tokens = {name: float(documents.lengths.sum(dtype=np.int64)) for name, documents in held.items()}
            found = [DocumentSource(name, each, self._weight(name, tokens[name])) for name, each in held.items()]
            self._mixed[split] = MixedDocuments(tuple(found))
        return self._mixed[split]

    def _weight(self, name: str, tokens: float) -> float:
        if self.weights:
            return self.weights[name]
        weight: float = (self.epochs.get(name, 1.0) * tokens) ** (1 / self.temperature)
        return weight

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Shares are given once, of sources that there are; and with weights each source has one."""
        names, weights = node.keys("sources"), node.settings["weights"]
        if not names:
            yield node.problem("sources", "a mixture without sources", 'write sources = { name = "@node", ... }')
        for key in ("weights", "epochs"):
            for name, value in node.settings[key].items():
                if name not in names:
                    hint = did_you_mean(name, names)
                    yield node.problem((key, name), f"{key}.{name}: sources has no {name!r}", hint)
                elif not 0 <= value < inf:
                    yield node.problem((key, name), f"{key}.{name}: {value} is no share", "write a number from 0 on")
        if weights and (missing := [name for name in names if name not in weights]):
            text = f"weights leaves out {' and '.join(missing)}"
            yield node.problem("weights", text, f"write weights.{missing[0]}, which may be 0")
        if weights and (node.settings["epochs"] or node.settings["temperature"] != 1):
            text = "weights are the shares themselves, so epochs and temperature have no effect"
            yield node.problem("weights", text, "leave out weights, or the others")
        if weights and not any(weights.values()):
            yield node.problem("weights", "no source has a share above 0", "write a weight above 0 for one")
