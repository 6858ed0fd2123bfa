"""Comparison between a run's recorded rows and the rows expected from its data and recipe."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from drawloom.components.checkpoint.reader import find_newest_valid_checkpoint, load_node_state
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.data.loader import Loader, compute_row_digests
from drawloom.components.data.order.stream import list_row_sources
from drawloom.components.data.record import FOLDER
from drawloom.components.ports.data import PackedDataset, RowSource, TrainingData
from drawloom.components.ports.distributed import Mesh, PerDimension
from drawloom.components.storage.step_log import read_step_log
from drawloom.graph import UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.testing import fake

MAX_FAULTS = 20  # listed faults
MAX_PARTS = 2**20  # maximum of data-parallel ranks


class Audit(NamedTuple):
    """Faults in a run's recorded rows, and a summary."""

    faults: list[str]
    summary: str


def audit_recorded_rows(project: Project, run: Path) -> Audit:
    """
    Compare a run's recorded rows with the expected rows.

    The recipe in the run folder and the newest checkpoint determine each step's rows. Row contents come from the
    present data, and it must equal the training run's data.
    """
    recorded, damage = _read_row_digests_and_faults(run)
    recipe = Recipe.load(run, project=project)
    graph = recipe.graph.require_valid()
    rows, data, mesh = (find_only_node(graph, port) for port in (PackedDataset, TrainingData, Mesh))
    if graph.nodes[data].spec.cls is not Loader:
        raise UserError(
            f"[{data}] is not a data.loader, and no other node's rows can be audited; audit a run with data.loader", 2
        )
    # the rows of a step are the same on any number of ranks
    one_rank = fake(Mesh, sizes=PerDimension(), indices=PerDimension.of_first_rank())
    with recipe.with_values({data: {"workers": 0}}).open(data, replacements={mesh: one_rank}) as objects:
        loader: Loader = objects[data]
        if (checkpoint := find_newest_valid_checkpoint(run)) is not None:
            objects[rows].load_state_dict(load_node_state(checkpoint, rows))
            loader.load_state_dict(load_node_state(checkpoint, data))
        faults, summary = _compare_rows(recorded, objects[rows], loader)
    return Audit(damage + faults, summary)


@attrs.frozen
class _DigestCache:
    """Cache for row digests, by row and length: a length curriculum changes a row's digest."""

    rows: PackedDataset
    loader: Loader
    digests: dict[tuple[int, int | None], str] = attrs.field(factory=dict)

    def compute_row_digest(self, row: int, step: int) -> str:
        """Return a row's digest at a step."""
        key = (row, self.loader.max_document_length_at(step))
        if key not in self.digests:
            [self.digests[key]] = compute_row_digests(
                self.loader.split_long_documents_for_step(self.rows.batch("train", [row]), step)
            )
        return self.digests[key]

    def find_row_name(self, digest: str) -> str:
        """Return the name of the row with a digest, if the digest was computed for an earlier comparison."""
        return next((f"row {row}" for (row, _), known in self.digests.items() if known == digest), "an unknown row")


def _compare_rows(recorded: dict[int, list[str]], rows: PackedDataset, loader: Loader) -> Audit:
    """Compare recorded digests with the loader's rows."""
    expected, seen, faults = _DigestCache(rows, loader), Counter[int](), []
    for step in range(loader.last_changed_step + 1, max(recorded) + 1):
        indices = loader.list_rows_on_all_ranks(step)
        seen.update(indices)
        digests = Counter(expected.compute_row_digest(row, step) for row in indices)
        if step not in recorded:
            faults.append(f"step {step} is not recorded")
            continue
        actual = Counter(recorded[step])
        faults += [f"step {step}: {expected.find_row_name(digest)} is missing" for digest in digests - actual]
        faults += [f"step {step}: {expected.find_row_name(digest)} is there too often" for digest in actual - digests]
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    verdict = "differs from what it should be" if faults else "is what it should be"
    counts = "; ".join(_describe_repetitions(source, seen) for source in list_row_sources(rows))
    before = (
        f" (the first {loader.last_changed_step} had another batch size, order or corpus, and are not compared)"
        if loader.last_changed_step
        else ""
    )
    return Audit(faults[:MAX_FAULTS] + more, f"{max(recorded)} steps{before}: the data {verdict}: {counts}")


def _describe_repetitions(source: RowSource, times_seen: Counter[int]) -> str:
    """Describe for a source how many rows were seen once, twice and so on, and how many not yet."""
    own = range(source.first, source.first + source.rows)
    rows_by_times = Counter(times for row, times in times_seen.items() if row in own)
    counts = [f"{number:,} rows {times} time{'s' * (times > 1)}" for times, number in sorted(rows_by_times.items())]
    name = f"{source.name} has " if source.name else ""
    return name + ", ".join([*counts, f"{source.rows - sum(rows_by_times.values()):,} rows not yet"])


def _read_row_digests_and_faults(run: Path) -> tuple[dict[int, list[str]], list[str]]:
    """Return the row digests by step, from all ranks' files, and the faults in these files."""
    parts: dict[int, dict[int, list[str]]] = {}
    expected: dict[int, int] = {}
    rows, faults = _read_intact_records_and_faults(run / FOLDER)
    for row in rows:
        step, part = row["step"], row["part"]
        digests = parts.setdefault(step, {}).setdefault(part, row["rows"])
        if digests != row["rows"]:
            raise UserError(
                f"step {step}: two ranks with the same data-parallel index {part} recorded different rows; give "
                "every rank the same corpus, tokenizer and seed"
            )
        expected[step] = row["parts"]
    if not parts:
        raise UserError(
            f"{run} has no record of its rows; record them with record.use=data.record "
            "edit.trainer.phases.after.@forward_backward=@record",
            2,
        )
    recorded = {
        step: [digest for number in range(expected[step]) for digest in digests_by_part.get(number, [])]
        for step, digests_by_part in parts.items()
    }
    return recorded, faults


def _read_intact_records_and_faults(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the intact records from all ranks' files, and one sentence per damaged file."""
    rows, faults = [], []
    for path in sorted(folder.glob("rank-*.jsonl")):
        try:
            lines, damage = read_step_log(path)
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); remove it") from error
        rows += [line.row for line in lines if not line.has_changed and _is_record(line.row)]
        faults += [f"{path} is damaged: {text}"] if (text := str(damage)) else []
    return rows, faults


def _is_record(json_row: dict[str, Any]) -> bool:
    """Return whether a row has a record's fields, with sensible values."""
    part, parts, rows = (json_row.get(name) for name in ("part", "parts", "rows"))
    return type(part) is int and type(parts) is int and 0 <= part < parts <= MAX_PARTS and isinstance(rows, list)
