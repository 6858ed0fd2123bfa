"""
The page: one self-contained HTML file; its script draws the curves from data in the file.

Names, samples and recipes may come from a stranger. They are escaped. In addition, the page's Content-Security-Policy
allows only the script and the style with the named hashes, so unescaped markup would have no effect.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from drawloom.components.report.ettr import compute_ettr
from drawloom.components.report.run_record import RunRecord
from drawloom.components.report.seed_groups import SeedGroup, find_last_common_step, group_runs_by_settings
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.components.storage.step_log import StepLine
from drawloom.graph.drawing.svg import escape_xml, replace_unprintable

FOLDER = Path(__file__).parent
COLOURS = 8  # classes c0 to c7 of the style
MARKED_KINDS = ("resumed", "killed", "stopped", "skipped")
MAX_SAMPLE_START = 300  # characters of a sample that are shown at once
MAX_VALUE_LENGTH = 300  # characters of a recipe's value in the table of differences
CURVES = {
    "reward": "reward",
    "validation_reward": "validation reward",
    "loss": "loss",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "mfu": "model FLOPs utilization",
    "memory": "memory in bytes",
}
"""Titles of the curves that are shown first."""


def render_page(runs: Sequence[RunRecord], heading: str = "", introduction: str = "") -> str:
    """
    Return the report about runs as HTML.

    `heading` is a comment on the first line, after the doctype, and `introduction` a text above the tables.
    """
    script, style = ((FOLDER / name).read_text("utf-8") for name in ("page.js", "page.css"))
    allowed = f"script-src {_content_security_hash(script)}; style-src {_content_security_hash(style)}"
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; {allowed}"
    title = ", ".join(run.name for run in runs)
    groups = group_runs_by_settings(runs)
    begin = introduction and f"<pre>{escape_xml(introduction)}</pre>"
    parts = [
        f"<!doctype html>{f'<!-- {heading} -->' if heading else ''}",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape_xml(title)}</title><style>{style}</style></head><body>",
        f"<header><h1>{escape_xml(title)}</h1></header><main>{begin}",
        *(_render_seed_group_table(groups) if len(runs) > 1 else ()),
        *_render_key_number_table(runs, groups),
        *CONTROLS,
        *(part for number, group in enumerate(groups) for run in group.runs for part in _render_run(run, number)),
        "</main>",
        f'<script type="application/json" id="data">{_dump_curves_as_json(groups)}</script>',
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


CONTROLS = (
    '<section id="curves" hidden><h2>Curves</h2><div id="controls">',
    '<label>over <select id="axis"></select></label>',
    '<label><input type="checkbox" id="log"> logarithmic</label>',
    '<label>smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"></label>',
    '<label><input type="checkbox" id="marks" checked> kills, resumes, skipped steps</label>',
    '</div><div id="legend"></div><div id="charts"></div>',
    '<details id="more" hidden><summary></summary><div></div></details></section>',
    "<noscript><p>The curves are drawn by the page's script; all else is below.</p></noscript>",
)


def _content_security_hash(content: str) -> str:
    """Return the content's hash for the page's content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _dump_curves_as_json(groups: Sequence[SeedGroup]) -> str:
    """Return all groups' curves as JSON, escaped so that it can't close its HTML element."""
    data = {"titles": CURVES, "runs": [_describe_group_for_json(group) for group in groups]}
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII, without surrogates
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _describe_group_for_json(group: SeedGroup) -> dict[str, object]:
    """Return a group's curves and marks for JSON; over several seeds, means with bands from minimum to maximum."""
    curves = {
        replace_unprintable(name): {
            "x": curve.x,
            "y": curve.y,
            **({"low": curve.low, "high": curve.high} if curve.low else {}),
        }
        for name, curve in group.curves_over_seeds().items()
    }
    marks = [[event.step, event.kind] for run in group.runs for event in run.log.events if event.kind in MARKED_KINDS]
    seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
    return {
        "name": replace_unprintable(f"{group.name}{seeds}"),
        "axes": group.runs[0].metrics.thin_all_axes(),
        "curves": curves,
        "marks": marks,
    }


def _render_seed_group_table(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Yield a table with a row per group of seeds: differing settings, and losses."""
    keys = list(groups[0].settings)
    losses = ("loss", "validation_loss")
    ends = {name: step for name in losses if (step := find_last_common_step(groups, name)) is not None}
    head = [
        "recipe",
        "seeds",
        *(f"{CURVES[name]}, step {step:,}" for name, step in ends.items()),
        "best validation loss",
        *keys,
    ]
    rows = []
    for group in groups:
        spreads = [group.spread_at_step(name, step) for name, step in ends.items()]
        cells = [str(spread or "") for spread in [*spreads, group.spread_of_best_values("validation_loss")]]
        values = [group.settings[key][:MAX_VALUE_LENGTH] for key in keys]
        rows.append([group.name, str(len(group.runs)), *cells, *values])
    yield '<section id="differences"><h2>Recipes</h2>'
    yield from _render_differing_columns(head, rows, [number % COLOURS for number in range(len(groups))])
    if len(groups) > 1 and not keys:
        yield "<p>Some recipes can't be read, so that their differences are not known.</p>"
    elif len(groups) == 1:
        yield "<p>The recipes differ in seeds and names alone.</p>"
    yield "</section>"


def _render_key_number_table(runs: Sequence[RunRecord], groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Yield a table with planned and measured figures, with a column per run in the colour of its group."""
    columns = [dict(_list_key_numbers(run)) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "") for column in columns)] for label in labels]
    numbers = {id(run): number for number, group in enumerate(groups) for run in group.runs}
    colours = [numbers[id(run)] % COLOURS for run in runs]
    yield '<section id="overview">'
    yield from _render_table(["", *(run.name for run in runs)], rows, column_colours=colours)
    yield "</section>"


def _list_key_numbers(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield a run's figures as (label, text): model, data, steps, tokens, times, losses."""
    metrics, log = run.metrics, run.log
    yield from ((label, words) for label, words in log.header.items() if label in ("model", "data", "device"))
    if metrics.steps:
        total = f" of {log.total:,}" if log.total else ""
        yield "steps", f"{metrics.steps[-1]:,}{total}"
        if metrics.total_tokens_by_step[-1]:
            yield "tokens", f"{metrics.total_tokens_by_step[-1]:,.0f}"
        if (seconds := metrics.total_seconds_by_step[-1]) > 0:
            yield "time in steps", str(timedelta(seconds=round(min(seconds, 1e9))))
            yield "mean speed", f"{metrics.total_tokens_by_step[-1] / seconds:,.0f} tokens/s"
    if (loss := metrics.last_value("loss")) is not None:
        yield "last loss", f"{loss:.4f}"
    if (best := metrics.smallest_value_and_step("validation_loss")) is not None:
        yield "best validation loss", f"{best[0]:.4f} after step {best[1]:,}"
    if (reward := metrics.largest_value("validation_reward")) is not None:
        yield "best validation reward", f"{reward:.4f}"
    if "memory" in log.header:
        yield "memory, planned", log.header["memory"]
    if (memory := metrics.largest_value("memory")) is not None:
        yield "memory, measured", f"{format_decimal_byte_size(memory)} at most"
    if log.skipped:
        yield "skipped steps", f"{log.skipped:,}"
    if (ratio := compute_ettr(log, metrics)) is not None:
        yield "effective training time", str(ratio)
    if log.starts > 1:
        yield "processes", f"{log.starts}, one after another"


def _render_run(run: RunRecord, number: int) -> Iterator[str]:
    """Yield a run's section: events, checkpoints, plan, sample and drawings."""
    yield f'<section class="run"><h2 class="c{number % COLOURS}">{escape_xml(run.name)}</h2>'
    yield from _render_rollouts(run.rollouts)
    yield from _render_events(run)
    yield from _render_checkpoints(run)
    if run.plan:
        yield f"<h3>Planned and measured</h3><pre>{escape_xml(run.plan)}</pre>"
    yield from _render_sample(run.sample)
    if run.drawings.missing:
        yield f"<p>The graph is not drawn: {escape_xml(run.drawings.missing)}</p>"
    # drawloom's own drawings are not escaped here, because they escape the names that they contain
    for title, drawing, is_open in (
        ("One step", run.drawings.step, True),
        ("The schedule of a step, simulated", run.drawings.schedule, True),
        ("The graph", run.drawings.graph, False),
    ):
        if drawing:
            attribute = " open" if is_open else ""
            yield f'<details{attribute}><summary>{title}</summary><div class="drawing">{drawing}</div></details>'
    if run.recipe:
        yield f"<details><summary>The resolved recipe</summary><pre>{escape_xml(run.recipe)}</pre></details>"
    yield "</section>"


def _render_rollouts(recorded: StepLine | None) -> Iterator[str]:
    """Yield a table of a step's sampled completions with their rewards; of a stranger's file as far as it is one."""
    completions = recorded.row.get("completions") if recorded else None
    if not recorded or not isinstance(completions, list) or not completions:
        return
    head = ["reward", "advantage", "tokens", "stop", "prompt", "completion"]
    rows = [[_format_cell(entry.get(key)) for key in head] for entry in completions if isinstance(entry, dict)]
    yield f"<h3>Completions sampled in step {recorded.step:,}</h3>"
    yield from _render_table(head, rows, prose=True)


def _format_cell(value: object) -> str:
    """Return a number with 3 decimals, or the beginning of a text."""
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)[:MAX_SAMPLE_START]


def _render_sample(sample: str) -> Iterator[str]:
    """Yield the sample; a long one is folded."""
    if not sample:
        return
    heading, line, words = sample.partition("\n")
    short = f"{heading}{line}{words[:MAX_SAMPLE_START]}"
    if len(words) <= MAX_SAMPLE_START + 1:  # with the line's end
        yield f"<h3>Sample</h3><pre>{escape_xml(sample)}</pre>"
    else:
        yield f"<h3>Sample</h3><pre>{escape_xml(short)} ...</pre>"
        yield f"<details><summary>All of the sample</summary><pre>{escape_xml(sample)}</pre></details>"


def _render_events(run: RunRecord) -> Iterator[str]:
    """Yield the table of events."""
    if not run.log.events:
        return
    omitted = f" ({run.log.omitted:,} in the middle are left out)" if run.log.omitted else ""
    yield f"<h3>Events{omitted}</h3>"
    head = ["time", "after step", "event", "what the log says"]
    yield from _render_table(
        head, [[event.time, f"{event.step:,}", event.kind, event.text] for event in run.log.events], prose=True
    )


def _render_checkpoints(run: RunRecord) -> Iterator[str]:
    """Yield the table of checkpoints."""
    if not run.checkpoints:
        return
    yield "<h3>Checkpoints</h3>"
    rows = []
    for step, manifest in run.checkpoints:
        if manifest is None:
            rows.append([f"{step:,}", "corrupt, or of another version of drawloom", "", "", ""])
            continue
        losses = [manifest.values.get(name) for name in ("loss", "validation_loss")]
        cells = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        rows.append(
            [f"{step:,}", *cells, format_decimal_byte_size(manifest.total_file_bytes), f"{manifest.world_size}"]
        )
    yield from _render_differing_columns(["step", "loss", "validation loss", "size", "ranks"], rows)


def _render_differing_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], row_colours: Sequence[int] = ()
) -> Iterator[str]:
    """Yield a table without columns with equal cells, except the first column, and a sentence about these cells."""
    equal = [number for number in range(1, len(head)) if len(rows) > 1 and len({row[number] for row in rows}) == 1]
    lines = [[cell for number, cell in enumerate(row) if number not in equal] for row in (head, *rows)]
    yield from _render_table(lines[0], lines[1:], row_colours=row_colours)
    if words := [f"{head[number]} {rows[0][number]}" for number in equal if rows[0][number]]:
        yield f'<p class="equal">The same in each: {escape_xml(", ".join(words))}.</p>'


def _render_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    column_colours: Sequence[int] = (),
    row_colours: Sequence[int] = (),
    prose: bool = False,
) -> Iterator[str]:
    """
    Yield a table whose first column names its rows.

    With `column_colours`, the other columns are runs, and a row with equal cells becomes one wide cell. With
    `row_colours`, rows are runs. With `prose`, the last column is text.
    """
    classes = [f' class="c{number}"' for number in column_colours] or [""] * (len(head) - 1)
    row_classes = [f' class="c{number}"' for number in row_colours] or [""] * len(rows)
    cells = "".join(f"<th{name}>{escape_xml(cell)}</th>" for name, cell in zip(classes, head[1:], strict=True))
    kind = f"table{' prose' if prose else ''}"
    corner = f"<th>{escape_xml(head[0])}</th>"
    yield f'<div class="{kind}" tabindex="0"><table><thead><tr>{corner}{cells}</tr></thead><tbody>'
    for row_class, (name, *values) in zip(row_classes, rows, strict=True):
        if column_colours and len(values) > 1 and len(set(values)) == 1:
            yield f'<tr><th>{escape_xml(name)}</th><td colspan="{len(values)}">{escape_xml(values[0])}</td></tr>'
        else:
            cells = "".join(f"<td>{escape_xml(cell)}</td>" for cell in values)
            yield f"<tr><th{row_class}>{escape_xml(name)}</th>{cells}</tr>"
    yield "</tbody></table></div>"
