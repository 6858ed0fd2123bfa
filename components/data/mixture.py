"""Weighted mixture for tokenized corpora."""

from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np

from drawloom import Problem, UserError, above, component, internal, setting
from drawloom.components.data.mixed_documents import DocumentSource, MixedDocuments
from drawloom.graph.problems import did_you_mean
from drawloom.ports import Split, TokenCorpus


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
                tokens = self.epochs.get(name, 1.0) * float(documents.lengths.sum(dtype=np.int64))
                weight: float = self.weights[name] if self.weights else tokens ** (1 / self.temperature)
                sources.append(DocumentSource(name, documents, weight))
            self._mixed[split] = MixedDocuments(tuple(sources))
        return self._mixed[split]

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
