"""Compares the rows that a run has recorded with those that its data and recipe make it see."""

from collections import Counter
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint.reader import load_node, newest
from drawloom.components.commands._recipes import only
from drawloom.components.data.loader import Loader
from drawloom.components.data.order.stream import row_sources
from drawloom.components.data.record import FOLDER, row_digests
from drawloom.components.ports.data import PackedDataset, RowSource, TrainingData
from drawloom.components.ports.distributed import Mesh, PerDimension
from drawloom.components.storage.step_log import read_steps
from drawloom.graph import UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.testing import fake

MOST = 20  # faults that are listed
MAX_PARTS = 2**20  # data-parallel ranks


def audit(project: Project, run: Path) -> tuple[list[str], str]:
    """
    What differs between the rows that a run saw and those that it should have seen, and a summary.

    The rows of a step follow from the recipe in the run folder and the newest checkpoint, and their content from the
    data as it is now, which has to be what that checkpoint was made with.
    """
    recorded, damage = _recorded(run)
    recipe = Recipe.load(run, project=project)
    graph = recipe.graph.require_valid()
    rows, data, mesh = (only(graph, port) for port in (PackedDataset, TrainingData, Mesh))
    if graph.nodes[data].spec.cls is not Loader:
        raise UserError(f"[{data}] is not a data.loader, so the rows that it should have given are unknown", 2)
    # the rows of a step are the same on any number of ranks
    one_rank = fake(Mesh, sizes=PerDimension(), indices=PerDimension.of_first_rank())
    with recipe.with_values({data: {"workers": 0}}).open(data, replacements={mesh: one_rank}) as objects:
        loader: Loader = objects[data]
        if (checkpoint := newest(run)) is not None:
            objects[rows].load_state_dict(load_node(checkpoint, rows))
            loader.load_state_dict(load_node(checkpoint, data))
        faults, summary = _compared(recorded, objects[rows], loader)
    return damage + faults, summary


@attrs.frozen
class _Expected:
    """The digests of rows, computed once each; those of a length curriculum are other rows."""

    rows: PackedDataset
    loader: Loader
    digests: dict[tuple[int, int | None], str] = attrs.field(factory=dict)

    def digest(self, row: int, step: int) -> str:
        key = (row, self.loader.length_at(step))
        if key not in self.digests:
            [self.digests[key]] = row_digests(self.loader.shortened(self.rows.batch("train", [row]), step))
        return self.digests[key]

    def name(self, digest: str) -> str:
        """The row with a digest, if it is one that a step should have seen so far."""
        return next((f"row {row}" for (row, _), each in self.digests.items() if each == digest), "an unknown row")


def _compared(recorded: dict[int, list[str]], rows: PackedDataset, loader: Loader) -> tuple[list[str], str]:
    expected, seen, faults = _Expected(rows, loader), Counter[int](), []
    for step in range(loader.last_resized_step + 1, max(recorded) + 1):
        wanted = loader.rows_of(step)
        seen.update(wanted)
        digests = Counter(expected.digest(row, step) for row in wanted)
        if step not in recorded:
            faults.append(f"step {step} is not recorded")
            continue
        found = Counter(recorded[step])
        faults += [f"step {step}: {expected.name(digest)} is missing" for digest in digests - found]
        faults += [f"step {step}: {expected.name(digest)} is there too often" for digest in found - digests]
    more = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
    verdict = "differs from what it should be" if faults else "is what it should be"
    counts = "; ".join(_counts(source, seen) for source in row_sources(rows))
    before = (
        f" (of which the first {loader.last_resized_step}, of another size, are not compared)"
        if loader.last_resized_step
        else ""
    )
    return faults[:MOST] + more, f"{max(recorded)} steps{before}: the data {verdict}: {counts}"


def _counts(source: RowSource, seen: Counter[int]) -> str:
    """How often the rows of a source were seen."""
    own = range(source.first, source.first + source.rows)
    often = Counter(times for row, times in seen.items() if row in own)
    counts = [f"{number:,} rows {times} time{'s' * (times > 1)}" for times, number in sorted(often.items())]
    name = f"{source.name} has " if source.name else ""
    return name + ", ".join([*counts, f"{source.rows - sum(often.values()):,} rows not yet"])


def _recorded(run: Path) -> tuple[dict[int, list[str]], list[str]]:
    """The digests of the rows of each step, of all parts, from the files of all ranks; and faults of these files."""
    parts: dict[int, dict[int, list[str]]] = {}
    expected: dict[int, int] = {}
    rows, faults = _lines(run / FOLDER)
    for row in rows:
        step, part = row["step"], row["part"]
        digests = parts.setdefault(step, {}).setdefault(part, row["rows"])
        if digests != row["rows"]:
            raise UserError(f"step {step}: two ranks with the same part of the data have recorded other rows")
        expected[step] = row["parts"]
    if not parts:
        raise UserError(
            f"{run} has no record of its rows; record them with record.use=data.record "
            "edit.trainer.phases.after.@forward_backward=@record",
            2,
        )
    recorded = {
        step: [digest for number in range(expected[step]) for digest in held.get(number, [])]
        for step, held in parts.items()
    }
    return recorded, faults


def _lines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the intact rows of all files, and a sentence for each file with others."""
    rows, faults = [], []
    for path in sorted(folder.glob("rank-*.jsonl")):
        try:
            lines, damage = read_steps(path)
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); remove it") from error
        rows += [line.row for line in lines if not line.has_changed and _is_record(line.row)]
        faults += [f"{path} is damaged: {text}"] if (text := str(damage)) else []
    return rows, faults


def _is_record(row: dict[str, Any]) -> bool:
    """Whether a row has the fields of a record, with sensible values."""
    part, parts, rows = (row.get(name) for name in ("part", "parts", "rows"))
    return type(part) is int and type(parts) is int and 0 <= part < parts <= MAX_PARTS and isinstance(rows, list)
