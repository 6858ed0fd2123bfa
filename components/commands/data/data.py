"""show a recipe's data rows and statistics, or audit the rows that a run has seen"""

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from drawloom import at_least
from drawloom.components.checkpoint.reader import find_newest_valid_checkpoint, load_node_state
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.data.batch_checks import compute_row_digests
from drawloom.components.data.loader import Loader
from drawloom.components.data.mixed_documents import list_document_sources
from drawloom.components.data.order.stream import convert_token_weights_to_shares, list_row_sources
from drawloom.components.data.record import FOLDER
from drawloom.components.report.run_record import check_is_run
from drawloom.components.storage.step_log import read_step_log
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    OverlayCommand,
    Project,
    Recipe,
    Result,
    TextResult,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.cli.terminal import escape_control_characters
from drawloom.graph.testing import fake
from drawloom.ports import (
    IGNORE_INDEX,
    ChatTokenizer,
    Mesh,
    PackedDataset,
    PerDimension,
    RowsOfTokens,
    RowSource,
    Split,
    TokenDocuments,
    Tokenizer,
    TracedRows,
    TrainingData,
    require_token_batch,
)

MAX_FAULTS = 20  # listed faults
MAX_PARTS = 2**20  # maximum of data-parallel ranks


def audit_recorded_rows(project: Project, run: Path) -> "FaultsResult":
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
    return FaultsResult(str(run), damage + faults, summary)


def _compare_rows(recorded: dict[int, list[str]], rows: PackedDataset, loader: Loader) -> tuple[list[str], str]:
    """Compare recorded digests with the loader's rows, and return the faults and a summary."""
    known: dict[tuple[int, int | None], str] = {}  # by row and length: a length curriculum changes a row's digest
    names: dict[str, str] = {}  # of rows, by their digests
    seen, faults = Counter[int](), list[str]()
    for step in range(loader.last_changed_step + 1, max(recorded) + 1):
        indices = loader.list_rows_on_all_ranks(step)
        seen.update(indices)
        keys = [(row, loader.max_document_length_at(step)) for row in indices]
        for key in keys:
            if key not in known:
                batch = loader.split_long_documents_for_step(rows.batch("train", [key[0]]), step)
                [known[key]] = compute_row_digests(batch)
                names.setdefault(known[key], f"row {key[0]}")
        digests = Counter(known[key] for key in keys)
        if step not in recorded:
            faults.append(f"step {step} is not recorded")
            continue
        actual = Counter(recorded[step])
        for verdict, others in (("is missing", digests - actual), ("is there too often", actual - digests)):
            faults += [f"step {step}: {names.get(digest, 'an unknown row')} {verdict}" for digest in others]
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    verdict = "differs from what it should be" if faults else "is what it should be"
    counts = "; ".join(_describe_repetitions(source, seen) for source in list_row_sources(rows))
    before = (
        f" (the first {loader.last_changed_step} had another batch size, order or corpus, and are not compared)"
        if loader.last_changed_step
        else ""
    )
    return faults[:MAX_FAULTS] + more, f"{max(recorded)} steps{before}: the data {verdict}: {counts}"


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


LENGTHS = "length: least, median, mean, most"
COLOURS = ("cyan", "yellow")
SPLITS: tuple[Split, ...] = ("train", "validation")
VISIBLE = {"\n": "⏎\n", "\t": "⇥"}


def format_statistics(rows: PackedDataset, copies: int | None) -> str:
    """
    Return a table with one line per split: rows, fill rate, documents, tokens, and document lengths.

    Mixtures add a line per source; training lines include the source's share of tokens and rows. The last line has the
    validation documents' number with copies in the training split, if known.
    """
    head = f"{'split':<12} {'rows':<11} {'fill rate':<11} {'documents':<11} {'tokens':<15} {LENGTHS:<33}"
    mixed = any(source.name for source in list_row_sources(rows))
    lines = [head + (" share of tokens, of rows" if mixed else "")]
    for split in SPLITS:
        lines.append(
            _format_rows_line(split, rows.count_rows(split), rows.fill_rate(split), _document_lengths(rows, split))
        )
        if mixed:
            lines += _format_source_lines(rows, split)
    if copies is not None:
        lines.append(f"{copies:,} validation documents are also in the training split")
    return "\n".join(line.rstrip() for line in lines)


@output_class
class SplitData:
    """Statistics of a split."""

    split: Split = output("split")
    rows: int = output("number of rows")
    fill_rate: float = output("fraction of a row's tokens that are not padding")
    documents: int | None = output("number of documents, if known")
    tokens: int | None = output("number of tokens, if known")
    copies: int | None = output("number of validation documents that are also in the training split, if counted")


@output_class
class RowData:
    """A row of packed tokens; weights, like targets, belong to the token before."""

    split: Split = output("split")
    row: int = output("index of the row")
    tokens: Sequence[int] = output("token ids")
    targets: Sequence[int] = output("target ids; -100 is not a target")
    weights: Sequence[float] = output("weights of the targets")
    document_ids: Sequence[int] = output("index of the document in the row, by token")
    positions: Sequence[int] = output("position of the token in its document")
    sources: Sequence[str] = output("sources of the documents, if the data has them")


def count_validation_documents_in_training(rows: PackedDataset) -> int | None:
    """Count the validation documents whose ids a training document has, too; None if rows are not tokens."""
    if not isinstance(rows, RowsOfTokens):
        return None
    train, validation = (rows.tokens.documents(split) for split in SPLITS)
    candidates = np.flatnonzero(np.isin(train.lengths, validation.lengths)).tolist()
    trained = {_hash_document(train, number) for number in candidates}
    return sum(_hash_document(validation, number) in trained for number in range(len(validation.lengths)))


def _hash_document(documents: TokenDocuments, number: int) -> bytes:
    """Return a hash over a document's ids."""
    ids = documents.read(number, 0, int(documents.lengths[number])).ids
    return blake2b(ids.astype(np.uint32).data, digest_size=16).digest()


def summarize_splits(rows: PackedDataset, copies: int | None) -> list[SplitData]:
    """Return the statistics of all splits; `copies` counts the validation documents in the training split."""
    return [
        SplitData(
            split,
            rows.count_rows(split),
            rows.fill_rate(split),
            None if (known := _document_lengths(rows, split)) is None else len(known),
            None if known is None else int(known.sum(dtype=np.int64)),
            copies if split == "validation" else None,
        )
        for split in SPLITS
    ]


def read_row(rows: PackedDataset, split: Split, row: int) -> RowData:
    """Return a row as data."""
    batch = require_token_batch(rows.batch(split, [row]), "data show")
    return RowData(
        split=split,
        row=row,
        tokens=batch.tokens[0].tolist(),
        targets=batch.targets[0].tolist(),
        weights=batch.weights[0].tolist(),
        document_ids=batch.document_ids[0].tolist(),
        positions=batch.positions[0].tolist(),
        sources=list(rows.describe_row_origins(split, row)) if isinstance(rows, TracedRows) else [],
    )


def _format_rows_line(name: str, rows: int, fill_rate: float, lengths: np.ndarray | None) -> str:
    """Return a line for a split or source: rows, fill rate in %, document count, tokens and document lengths."""
    start = f"{name:<12} {rows:<11,} {100 * fill_rate:<11.3f}"
    if lengths is None or not len(lengths):
        return start
    measures = f"{lengths.min()}, {np.median(lengths):.0f}, {lengths.mean():.1f}, {lengths.max()}"
    return f"{start} {len(lengths):<11,} {int(lengths.sum(dtype=np.int64)):<15,} {measures:<33}"


def _document_lengths(rows: PackedDataset, split: Split) -> np.ndarray | None:
    """Return the lengths of a split's documents, or None if rows are not tokens."""
    return rows.tokens.documents(split).lengths if isinstance(rows, RowsOfTokens) else None


def _format_source_lines(rows: Any, split: Split) -> Iterator[str]:
    """Yield a mixture's lines, one per source."""
    weights = sum(source.weight for source in rows.row_sources(split))
    shares = convert_token_weights_to_shares(rows.row_sources("train"))
    documents = list_document_sources(rows.tokens.documents(split))
    for source, own in zip(rows.row_sources(split), documents, strict=True):
        rate = source.tokens / (source.rows * rows.length) if source.rows else 1.0
        line = _format_rows_line(f"  {source.name}", source.rows, rate, own.documents.lengths)
        if split == "train":
            row_share = shares.get(source.name, 0) / sum(shares.values())
            line = f"{line:<97} {100 * source.weight / weights:.2f} %, {100 * row_share:.2f} %"
        yield line


def print_row(data: RowData, tokenizer: Tokenizer | None) -> None:
    """
    Print a row: a line per document with its source, followed by its tokens.

    Tokens alternate between two colours, and tokens without target weight are dim. Without colours, `|` separates
    tokens, and ⟦ ⟧ enclose tokens with target weight. Without a tokenizer, tokens are numbers. Padding has one line.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    tokens, weights, ids = (np.array(values) for values in (data.tokens, data.weights, data.document_ids))
    targets, sources = sum(target != IGNORE_INDEX for target in data.targets), data.sources
    # the batch stores a target's weight at the token before the target
    own = np.concatenate([[0.0], weights[:-1]])
    console.print(f"{data.split} row {data.row}: {len(tokens)} tokens, {targets} targets")
    for number in range(int(ids.max()) + 1):
        indices = np.flatnonzero(ids == number)
        is_padding = bool(sources) and number >= len(sources)
        source = "padding" if is_padding else sources[number] if sources else f"document {number}"
        first, last = data.positions[indices[0]], data.positions[indices[-1]]
        console.print(
            f"[{indices[0]}:{indices[-1] + 1}] {escape_control_characters(source)}, positions {first} to {last}, "
            f"weights add up to {weights[indices].sum():g}",
            style="bold",
        )
        if is_padding:
            continue
        console.print(_colour_tokens(tokens[indices], own[indices], tokenizer, colours=console.is_terminal))


def _colour_tokens(tokens: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer | None, *, colours: bool) -> Text:
    """Return tokens in alternating colours, or with separators and brackets if `colours` is false."""
    text, trained = Text(), False
    for number, (piece, weight) in enumerate(zip(_decode_pieces(tokens, tokenizer), weights.tolist(), strict=True)):
        if not colours:
            text.append("⟧" * (trained and not weight) + "|" * (number > 0) + "⟦" * (bool(weight) and not trained))
            trained = bool(weight)
        text.append(piece, style=f"{'' if weight else 'dim '}{COLOURS[number % 2]}")
    return text.append("⟧" * trained)


def _decode_pieces(tokens: np.ndarray, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield one text per token."""
    for token in tokens.tolist():
        if tokenizer is None:
            yield f" {token}"
        elif token == tokenizer.eos_id and not isinstance(tokenizer, ChatTokenizer):
            yield "<end>"
        else:
            # A tokenizer of chats writes control tokens out, which `decode` leaves away.
            decode = tokenizer.decode_with_control_tokens if isinstance(tokenizer, ChatTokenizer) else tokenizer.decode
            text = decode([token])
            yield escape_control_characters("".join(VISIBLE.get(letter, letter) for letter in text))


@output_class
class RowsResult(TextResult):
    """Statistics of packed rows, or some rows, with `show`."""

    splits: Sequence[SplitData] = output("statistics by split")
    rows: Sequence[RowData] = output("rows of --row")


@output_class
class FaultsResult(Result):
    """Verdict about a run's rows, with `audit`."""

    subject: str = output("run folder")
    faults: Sequence[str] = output("one sentence per fault, the first ones only")
    summary: str = output("number of steps and rows")

    @property
    def exit_code(self) -> int:
        """1 if there are faults."""
        return FAILED if self.faults else OK

    def render(self, format: str) -> str:
        """Return the faults and the summary."""
        return "\n".join([*self.faults, self.summary])


@command
class DataCommand(OverlayCommand):
    """Rows and statistics, or a verdict about a run's rows."""

    action: Literal["show", "audit"] = argument("show rows and statistics, or audit a run")
    subject: str = argument("a recipe to show, or a run folder to audit", metavar="RECIPE|RUN")
    row: Sequence[int] = option(
        "show this row, counted from 0; may be repeated", default=(), metavar="N", check=at_least(0)
    )
    split: Split = option("split to show", default="train")

    def run(self, project: Project) -> RowsResult | FaultsResult:
        if self.action == "audit":
            check_is_run(Path(self.subject))
            return audit_recorded_rows(project, Path(self.subject))
        return self._print_rows_or_summarize(self.load_recipe(project, self.subject))

    def _print_rows_or_summarize(self, recipe: Recipe) -> RowsResult:
        """Print the requested rows; without any, return the statistics. Raises UserError for a missing row."""
        graph = recipe.graph.require_valid()
        name, tokenizers = find_only_node(graph, PackedDataset), graph.implementers(Tokenizer)[:1]
        with recipe.open([name, *tokenizers]) as objects:
            rows = objects[name]
            tokenizer = objects[tokenizers[0]] if tokenizers else None
            count = rows.count_rows(self.split)
            shown = []
            for row in self.row:
                if row >= count:
                    known = f"rows 0 to {count - 1}" if count else "no rows"
                    raise UserError(f"--row {row}: {self.split} has {known}", 2)
                shown.append(read_row(rows, self.split, row))
                print_row(shown[-1], tokenizer)
            copies = None if shown else count_validation_documents_in_training(rows)
            return RowsResult("" if shown else format_statistics(rows, copies), summarize_splits(rows, copies), shown)
