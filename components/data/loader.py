"""The data loader: the batches of a run, in an order that depends only on the seed."""

import logging
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, NoReturn

import attrs
import torch

from drawloom.components.data.order.stream import RowStream, Segment, row_shares, row_sources
from drawloom.components.data.workers import Workers
from drawloom.components.ports.data import (
    MAX_LENGTH,
    PackedDataset,
    RowOrder,
    TokenBatch,
    batch_types,
    has_pairs,
    token_batch,
)
from drawloom.components.ports.distributed import Group, Mesh, PerDimension
from drawloom.components.ports.run import Batching
from drawloom.components.state.batch import Batch
from drawloom.components.storage.tensor_source import bytes_of
from drawloom.graph import Problem, UserError, above, at_least, between, component, setting
from drawloom.graph.wiring.node import NodeView


@attrs.frozen(kw_only=True)
class LengthStage:
    """The greatest length of documents, until a step is done, or until a number of tokens are seen."""

    length: int = setting(check=between(2, MAX_LENGTH + 1), doc="tokens after which a document is cut")
    until_step: int | None = setting(default=None, check=at_least(1), doc="the last step with this length")
    until_tokens: int | None = setting(
        default=None,
        check=at_least(1),
        doc="the last step is the one that reaches this number of tokens, counted in full rows",
    )

    def holds(self, step: int, tokens: int) -> bool:
        """Whether a step is in this stage or before; `tokens` are those of all earlier steps."""
        return step <= (self.until_step or 0) or tokens < (self.until_tokens or 0)


def cut(batch: TokenBatch, length: int) -> TokenBatch:
    """
    The same tokens, with a document of its own for every `length` tokens of one.

    No token is lost, and the shapes are the same: attention reaches less far back, and positions start anew.
    """
    positions = batch.positions % length
    return batch.evolve(positions=positions, document_ids=torch.cumsum(positions == 0, dim=1) - 1)


log = logging.getLogger("drawloom.data")


@component
class Loader:
    """
    Training rows in an endless order of epochs; those of a mixture's sources alternate by the weights of these.

    A step may cross the end of an epoch. The state is the number of steps and rows taken, and from which positions on
    which shares of rows the sources have had. So a run resumes with any number of workers and data-parallel ranks, and
    with the next row even if its steps have other sizes than before.
    """

    rows: PackedDataset
    order: RowOrder
    batching: Batching
    mesh: Mesh
    workers: int = setting(
        default=0,
        impact="safe",
        check=between(0, 1001),
        doc="processes that make batches ahead of time; 0: batches are made in this process",
    )
    prefetch: int = setting(
        default=2, impact="safe", check=between(1, 10_001), doc="microbatches that each worker makes ahead of time"
    )
    timeout: float = setting(
        default=120.0, impact="safe", check=above(0), doc="seconds to wait for a worker's batch before it is an error"
    )
    lengths: list[LengthStage] = setting(
        factory=list, doc="length curriculum: greatest lengths of documents in earlier steps, in order"
    )
    _step: int = attrs.field(init=False, default=0)
    _offset: int = attrs.field(init=False, default=0)  # rows that steps of other sizes have taken more than these would
    _since: int = attrs.field(init=False, default=0)
    _workers: Workers | None = attrs.field(init=False, default=None)
    _stream: Iterator[Batch] | None = attrs.field(init=False, default=None)
    _checked: bool = attrs.field(init=False, default=False)
    _rows: RowStream = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Lay out the stream of rows. Raises UserError if there are no rows."""
        if self.rows.count("train") == 0:
            raise UserError("rows: the training split is empty; add text, or lower `validation_fraction` in the corpus")
        self._begin([])
        if self.workers:
            self._workers = Workers(self.rows, "train", self.workers)

    def close(self) -> None:
        """End the workers."""
        self._stream = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def next_step(self) -> list[Batch]:
        """
        This data-parallel rank's microbatches of the next step.

        The first call is a collective. Raises UserError if ranks that must see the same rows do not, or if a worker
        dies or hangs.
        """
        step = self._step + 1
        if self._stream is None:
            self._stream = self._batches(step)
        batches = [next(self._stream) for _ in self.batching.positions(step)]
        if self.lengths:
            batches = [self.shortened(batch, step) for batch in batches]
        # once is enough: later steps follow from the same seed, rows and order
        if not self._checked:
            check_leaves(self.rows, batches[0])
            check_consistency(self.mesh.world, self.batching.dp_rank, self.rows.count("train"), batches[0])
            self._checked = True
        self._step = step
        return batches

    def shortened(self, batch: Batch, step: int) -> Batch:
        """A batch as the curriculum has it in a step."""
        length = self.length_at(step)
        return batch if length is None else cut(token_batch(batch, "lengths"), length)

    def length_at(self, step: int) -> int | None:
        """The greatest length of documents in a step; None if they are not cut."""
        tokens = self._start(step) * self.rows.length
        return next((stage.length for stage in self.lengths if stage.holds(step, tokens)), None)

    def rows_of(self, step: int) -> list[int]:
        """The rows of a step, of all ranks."""
        return self._rows.rows(range(self._start(step), self._start(step + 1)))

    @property
    def since(self) -> int:
        """The steps that earlier starts of the run took with other sizes: `rows_of` knows only those after them."""
        return self._since

    def tokens_by_source(self, step: int) -> dict[str, float]:
        """
        The tokens of each source in all steps up to and with this one.

        All rows of a source count as many tokens as they have on average, so this is exact at the end of its epochs.
        """
        taken = self._rows.taken(self._start(step + 1))
        sources = self._rows.sources.values()
        return {source.name: taken.get(source.name, 0) * source.tokens / max(source.rows, 1) for source in sources}

    @property
    def position(self) -> int:
        """The place in the endless order with which the next step begins."""
        return self._start(self._step + 1)

    def continue_at(self, position: int) -> None:
        """Have the next step begin at a place in the order, as if steps so far had had other sizes."""
        self.load_state_dict(self.state_dict() | {"position": position})

    def state_dict(self) -> dict[str, Any]:
        """
        `step` and `position`: the steps and rows taken; of a mixture `shares`: those of rows, by position.

        If the first `since` steps had other sizes than later ones, `offset` is what they have taken more than these.
        """
        found: dict[str, Any] = {"step": self._step, "position": self.position}
        if self._since:
            found |= {"since": self._since, "offset": self._offset}
        if shares := {str(each.start): dict(each.shares) for each in self._rows.segments if each.shares.keys() != {""}}:
            found["shares"] = shares
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after a step; from there on, steps may have other sizes and sources other shares than before."""
        step, position = state["step"], state["position"]
        for key, number in (("step", step), ("position", position)):
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{key}: {number!r} is not an integer of 0 or more")
        self._step, self._stream = step, None
        self._offset = position - self.batching.start(step + 1)
        self._since = state.get("since", 0) if self._offset == state.get("offset", 0) else step
        self._begin([Segment(int(start), shares) for start, shares in state.get("shares", {}).items()])

    def _start(self, step: int) -> int:
        """The position with which a step begins."""
        return self.batching.start(step) + self._offset

    def _begin(self, segments: list[Segment]) -> None:
        """Lay out the stream of rows: earlier segments, and one for today's shares if those are others."""
        sources = {source.name: source for source in row_sources(self.rows)}
        shares = row_shares([*sources.values()])
        if segments and segments[-1].shares != shares:
            log.warning("from step %d on, the mixture's sources have other shares than before", self._step + 1)
            position = self._start(self._step + 1)
            segments = [*(each for each in segments if each.start < position), Segment(position, shares)]
        self._rows = RowStream(sources, self.order, segments or [Segment(0, shares)])

    def _batches(self, step: int) -> Iterator[Batch]:
        """The microbatches from this step on, without end."""
        wanted = self._row_indices(step)
        if self._workers is None:
            return (self.rows.batch("train", indices) for indices in wanted)
        return self._workers.batches(wanted, self.workers * self.prefetch, self.timeout)

    def _row_indices(self, step: int) -> Iterator[list[int]]:
        """The rows of each microbatch from this step on, without end."""
        microbatches = (positions for number in count(step) for positions in self.batching.positions(number))
        return (self._rows.rows([self._offset + position for position in positions]) for positions in microbatches)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Each length has one end, pairs of documents are not cut, and ranks along `context` share rows out evenly."""
        rows, mesh = node.neighbour("rows"), node.neighbour("mesh")
        if rows and mesh:
            length, ranks = rows.settings.get("length"), PerDimension.of_settings(mesh.settings).context
            if isinstance(length, int) and length % ranks:
                text = f"rows of {length} tokens can't be shared out over {ranks} ranks along 'context'"
                yield rows.problem("length", text, f"write a length that is a multiple of {2 * ranks}")
            for writer, batch_type in batch_types(rows):
                yield from _undivided(writer, batch_type, ranks, node)
        if node.settings["lengths"] and rows and has_pairs(rows.component):
            text = "lengths cuts documents, and those of pairs can't be compared then"
            yield node.problem("lengths", text, "leave it out, or use rows without pairs")
        for number, stage in enumerate(node.settings["lengths"]):
            if (stage.until_step is None) == (stage.until_tokens is None):
                text = f"lengths[{number}] ends at a step or after tokens, one of both"
                yield node.problem(("lengths", number), text, "write until_step = N or until_tokens = N")


def _undivided(writer: NodeView, batch_type: type[Batch], ranks: int, loader: NodeView) -> Iterator[Problem]:
    """Yield problems of batches that ranks along `context` or `lengths` cannot divide."""
    text = f"[{writer.name}] makes {batch_type.__name__}"
    if ranks > 1 and "tokens" not in batch_type.specs.values():
        text += f", which has no leaf of tokens to divide over {ranks} ranks along 'context'"
        yield writer.problem("use", text, "write mesh.context = 1")
    if loader.settings["lengths"] and not issubclass(batch_type, TokenBatch):
        yield loader.problem("lengths", f"lengths cuts documents of tokens, and {text}", "leave it out")


def check_leaves(rows: PackedDataset, batch: Any) -> None:
    """Raise UserError if a batch has another class than the data set declares, or its tensors do not fit together."""
    wanted = rows.batch_type or Batch
    if not isinstance(batch, wanted):
        given = type(batch).__name__
        raise UserError(f"rows: {type(rows).__name__} makes {wanted.__name__}, and a batch is a {given}; return one", 2)
    try:
        batch.check()
    except ValueError as error:
        text = f"rows: {type(rows).__name__} makes a batch whose leaves do not fit together"
        raise UserError(f"{text}: {error}", 2) from error


def check_consistency(world: Group, replica: int, rows: int, batch: Batch) -> None:
    """
    Raise UserError on every rank if two ranks of a data-parallel index have different batches, or any two ranks
    different numbers of rows. It is a collective of all ranks.
    """
    seen = world.gather_json([replica, rows, _fingerprint(batch)])
    first_of: dict[int, int] = {}
    for rank, (number, held, fingerprint) in enumerate(seen):
        if held != seen[0][1]:
            _refuse(0, rank, f"have {seen[0][1]} and {held} training rows")
        first = first_of.setdefault(number, rank)
        if fingerprint != seen[first][2]:
            _refuse(first, rank, f"have the same data-parallel index {number}, and see different rows")


def _refuse(first: int, second: int, what: str) -> NoReturn:
    hint = "give every rank the same corpus, tokenizer and seed"
    raise UserError(f"data: ranks {first} and {second} {what}; {hint}")


def _fingerprint(batch: Batch) -> str:
    digest = blake2b(digest_size=16)
    for tensor in batch.tensors():
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
