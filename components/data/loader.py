"""Data loader: deterministic batches whose order depends only on the seed."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING

import attrs
import torch

from drawloom import NodeView, Problem, UserError, above, at_least, between, component, internal, setting
from drawloom.ports import (
    MAX_LENGTH,
    Batch,
    Batching,
    Mesh,
    NodeState,
    PackedDataset,
    PerDimension,
    RowOrder,
    RowsOfTokens,
    TokenBatch,
    find_batch_types,
    require_token_batch,
    uses_preference_pairs,
)

if TYPE_CHECKING:
    from drawloom.components.data.order.stream import RowStream, Segment
    from drawloom.components.data.workers import Workers


@attrs.frozen(kw_only=True)
class LengthStage:
    """Maximum document length up to a step or a token count."""

    length: int = setting(
        "maximum document length in tokens; longer documents are cut", check=between(2, MAX_LENGTH + 1)
    )
    until_step: int | None = setting("this stage's last step", default=None, check=at_least(1))
    until_tokens: int | None = setting(
        "training tokens after which this stage ends, counted in full rows", default=None, check=at_least(1)
    )

    def has_not_ended_at(self, step: int, tokens_before_step: int) -> bool:
        """Return whether a step is in this stage or an earlier one; given the tokens before the step."""
        return step <= (self.until_step or 0) or tokens_before_step < (self.until_tokens or 0)


def split_long_documents(batch: TokenBatch, max_length: int) -> TokenBatch:
    """
    Split every document in a batch into documents with at most `max_length` tokens.

    Keeps all tokens and shapes: positions restart at every cut, and attention does not cross it.
    """
    positions = batch.positions % max_length
    return batch.evolve(positions=positions, document_ids=torch.cumsum(positions == 0, dim=1) - 1)


MAX_HASHED_ROWS = 64
"""An order is recognized by its first rows."""


@component
class Loader:
    """
    Deterministic data loader over endless epochs, with a mixture's rows interleaved by source weight.

    A step may cross an epoch's end. The state has the consumed steps and rows, and the sources' row shares by
    start position. A run can therefore resume with other numbers of workers and data-parallel ranks, and with
    another batch size, and still continue with the next row.
    """

    rows: PackedDataset
    order: RowOrder
    batching: Batching
    mesh: Mesh
    workers: int = setting(
        "worker processes to prepare batches ahead of time; 0: prepare them in the training process",
        default=0,
        impact="safe",
        check=between(0, 1001),
    )
    prefetch: int = setting(
        "microbatches per worker to prepare ahead of time", default=2, impact="safe", check=between(1, 10_001)
    )
    timeout: float = setting(
        "seconds to wait for a worker's batch before the run fails", default=120.0, impact="safe", check=above(0)
    )
    lengths: list[LengthStage] = setting(
        "sequence length curriculum: stages with a maximum document length, in order", factory=list
    )
    _step: int = internal(0)
    _offset: int = internal(0)  # rows consumed beyond those of as many steps of the present size
    next_row_position: int = internal(0)
    """Position in the endless row order where the next step begins."""
    last_changed_step: int = internal(0)
    """Last step with another batch size, order or corpus; `list_rows_on_all_ranks` is valid after it."""
    _workers: "Workers | None" = internal(None)
    _stream: Iterator[Batch] | None = internal(None)
    _checked: bool = internal(False)
    _rows: "RowStream" = internal(None)
    _first_rows: str = internal("")  # the digest of `_rows`, from the first save on

    def open(self) -> None:
        """Lay out the row stream, and start the workers. Raises UserError if there are no rows."""
        if self.rows.count_rows("train") == 0:
            if isinstance(self.rows, RowsOfTokens) and len(self.rows.tokens.documents("train").lengths):
                raise UserError(
                    f"rows: no training document fits into a row of {self.rows.length} tokens; raise `length`"
                )
            raise UserError("rows: the training split is empty; add text, or lower `validation_fraction` in the corpus")
        self._build_stream([])
        if self.workers:
            from drawloom.components.data.workers import Workers

            self._workers = Workers(self.rows, "train", self.workers)

    def close(self) -> None:
        """Stop the workers."""
        self._stream = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def next_step(self) -> list[Batch]:
        """
        Return this data-parallel rank's next microbatches (gradient accumulation sums over them).

        The first call is a collective. Raises UserError if ranks with one data-parallel index see different
        rows, or if a worker dies or hangs.
        """
        step = self._step + 1
        if self._stream is None:
            self._stream = self._iterate_batches_from(step)
        batches = [next(self._stream) for _ in self.batching.microbatch_row_positions(step)]
        if self.lengths:
            batches = [self.split_long_documents_for_step(batch, step) for batch in batches]
        # one check is enough: seed, rows and order determine the later steps
        if not self._checked:
            from drawloom.components.data.batch_checks import check_batch, check_ranks_have_consistent_batches

            check_batch(self.rows, batches[0])
            check_ranks_have_consistent_batches(
                self.mesh.world, self.batching.dp_rank, self.rows.count_rows("train"), batches[0]
            )
            self._checked = True
        self._step, self.next_row_position = step, self.batching.first_row_position(step + 1) + self._offset
        return batches

    def split_long_documents_for_step(self, batch: Batch, step: int) -> Batch:
        """Cut a batch's documents to the step's maximum length."""
        length = self.max_document_length_at(step)
        return batch if length is None else split_long_documents(require_token_batch(batch, "lengths"), length)

    def max_document_length_at(self, step: int) -> int | None:
        """Return the step's maximum document length; None if documents are not cut."""
        tokens = self._compute_start_position(step) * self.rows.length
        return next((stage.length for stage in self.lengths if stage.has_not_ended_at(step, tokens)), None)

    def list_rows_on_all_ranks(self, step: int) -> list[int]:
        """Return a step's row numbers, over all ranks."""
        return self._rows.rows_at(range(self._compute_start_position(step), self._compute_start_position(step + 1)))

    def cumulative_tokens_by_source(self, step: int) -> dict[str, float]:
        """
        Return the tokens per source in all steps up to and including this one.

        Counts a source's average tokens per row, so the sum is exact at an epoch's end.
        """
        rows = self._rows.count_rows_before(self._compute_start_position(step + 1))
        sources = self._rows.sources.values()
        return {source.name: rows.get(source.name, 0) * source.tokens / max(source.rows, 1) for source in sources}

    @property
    def rows_per_epoch(self) -> int:
        return sum(source.rows for source in self._rows.sources.values() if source.weight)

    def count_epochs_after(self, step: int) -> Fraction:
        return Fraction(self._compute_start_position(step + 1), self.rows_per_epoch)

    def skip_to_position(self, position: int) -> None:
        """Move the next step to a position in the order, as if earlier steps had had another batch size."""
        self.load_state_dict(self.state_dict() | {"position": position})

    def state_dict(self) -> NodeState:
        """
        Return the steps and rows consumed (`step`, `position`), a digest of the order's first rows (`first_rows`), and
        a mixture's row shares by start position (`shares`).

        After the batch size or the rows have changed, `since` is the last step before, and `offset` the rows
        consumed beyond as many steps with the new size.
        """
        self._first_rows = self._first_rows or self._compute_first_rows_digest(self._rows)
        state: NodeState = {"step": self._step, "position": self.next_row_position, "first_rows": self._first_rows}
        if self.last_changed_step:
            state |= {"since": self.last_changed_step, "offset": self._offset}
        mixed = [segment for segment in self._rows.segments if segment.shares.keys() != {""}]
        if mixed:
            state["shares"] = {str(segment.start): dict(segment.shares) for segment in mixed}
        return state

    def load_state_dict(self, state: NodeState) -> None:
        """Resume after a step; batch size and source shares may change from there on."""
        from drawloom.components.data.order.stream import RowStream, Segment

        step, position = state["step"], state["position"]
        for key, number in (("step", step), ("position", position)):
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{key}: {number!r} is not an integer of 0 or more")
        self._step, self._stream, self.next_row_position = step, None, position
        self._offset = position - self.batching.first_row_position(step + 1)
        segments = [Segment(int(start), shares) for start, shares in state.get("shares", {}).items()]
        self._build_stream(segments)
        # new shares hold from the next step on, and may be within the first rows
        earlier = RowStream(self._rows.sources, self.order, segments) if segments else self._rows
        has_old_rows = state.get("first_rows", digest := self._compute_first_rows_digest(earlier)) == digest
        is_unchanged = has_old_rows and self._offset == state.get("offset", 0)
        self.last_changed_step = state.get("since", 0) if is_unchanged else step

    def _compute_first_rows_digest(self, stream: "RowStream") -> str:
        """Return a digest for the order's first row numbers and the first row's content."""
        from drawloom.components.data.batch_checks import hash_first_rows

        numbers = stream.rows_at(range(MAX_HASHED_ROWS))
        return hash_first_rows(numbers, self.rows.batch("train", numbers[:1]))

    def _compute_start_position(self, step: int) -> int:
        """Return the position where a step begins."""
        return self.batching.first_row_position(step) + self._offset

    def _build_stream(self, segments: "list[Segment]") -> None:
        """Build `_rows` from earlier segments; the sources' shares may change with the next step."""
        from drawloom.components.data.order.stream import build_row_stream  # a check needs the settings alone

        self._first_rows = ""
        self._rows = build_row_stream(self.rows, self.order, segments, self._step + 1, self.next_row_position)

    def _iterate_batches_from(self, step: int) -> Iterator[Batch]:
        """Return an endless iterator over microbatches, beginning with a step."""
        # An endless iterator over the microbatches' row numbers, beginning with a step
        microbatches = (
            positions for later_step in count(step) for positions in self.batching.microbatch_row_positions(later_step)
        )
        row_indices = (
            self._rows.rows_at([self._offset + position for position in positions]) for positions in microbatches
        )
        if self._workers is None:
            return (self.rows.batch("train", indices) for indices in row_indices)
        return self._workers.batches(row_indices, self.workers * self.prefetch, self.timeout)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems with the length curriculum, and with uneven rows for the ranks along `context`."""
        rows, mesh = node.neighbour("rows"), node.neighbour("mesh")
        if rows and mesh:
            length, ranks = rows.settings.get("length"), PerDimension.from_settings(mesh.settings).context
            if isinstance(length, int) and length % ranks:
                text = f"rows of {length} tokens can't be partitioned over {ranks} ranks along 'context'"
                yield rows.problem("length", text, f"write a length that is a multiple of {2 * ranks}")
            for writer, batch_type in find_batch_types(rows):
                yield from _check_batch_has_token_dimension(writer, batch_type, ranks, node)
        if node.settings["lengths"] and rows and uses_preference_pairs(rows.component):
            text = "lengths would cut documents, and a cut pair can't be compared"
            yield node.problem("lengths", text, "leave it out, or use rows without pairs")
        for index, stage in enumerate(node.settings["lengths"]):
            if (stage.until_step is None) == (stage.until_tokens is None):
                text = f"lengths[{index}] needs exactly one of until_step and until_tokens"
                yield node.problem(("lengths", index), text, "write until_step = N or until_tokens = N")


def _check_batch_has_token_dimension(
    writer: NodeView, batch_type: type[Batch], ranks: int, loader: NodeView
) -> Iterator[Problem]:
    """Yield problems with batches that can't be divided along `context` or cut by `lengths`."""
    text = f"[{writer.name}] makes {batch_type.__name__}"
    if ranks > 1 and "tokens" not in batch_type.specs.values():
        text += f", which has no tensor with tokens to divide over {ranks} ranks along 'context'"
        yield writer.problem("use", text, "write mesh.context = 1")
    if loader.settings["lengths"] and not issubclass(batch_type, TokenBatch):
        yield loader.problem("lengths", f"lengths only applies to batches of tokens, and {text}", "leave lengths out")
