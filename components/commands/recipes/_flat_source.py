"""
A run as one file of plain PyTorch, from a template with the run's numbers.

The template covers a few components, and of these their default settings and settings in CONSTANTS. All else that
could change a loss is refused; nodes and settings whose impact is `safe` change none.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, NoReturn

import tomli

from drawloom import UserError
from drawloom.graph.cli.command import Recipe
from drawloom.graph.inspect.serialize import describe_provenance
from drawloom.graph.wiring.node import Node
from drawloom.ports import PerDimension, Phase, choose_micro_size

TEMPLATE = Path(__file__).with_name("flat_source.txt")
FEATURE = re.compile(r" {2}#\? (\w+)$")
"""The end of a template's line that is only for runs with a feature."""

COVERED: dict[str, Any] = tomli.loads(Path(__file__).with_name("flat_source.toml").read_text("utf-8"))
MODELS, SIZES, OTHERS = COVERED["models"], COVERED["sizes"], COVERED["others"]
CONSTANTS: Mapping[str, Mapping[str, str]] = COVERED["constants"] | dict.fromkeys(MODELS, SIZES)

MAX_MICROBATCH_LOGITS, MAX_MICROBATCH_TOKENS = 2**24, 2048
"""The cross entropy of a larger microbatch is computed in chunks, with other bits (kernels/cross_entropy/eager.py)."""


class FlatConstant(NamedTuple):
    """A constant's value, and its origin in the recipe."""

    value: Any
    origin: str


def format_flat_source(recipe: Recipe) -> str:
    """Return the Python file. Raises UserError for a node or a setting that the template can't express."""
    graph = recipe.graph.require_valid()
    phases = [graph.nodes[name] for name in graph.nodes[recipe.project.root].edges["phases"].targets]
    unused = {*graph.implementers(Phase)} - {node.name for node in phases}
    nodes: dict[str, Node] = {}
    for name, node in graph.nodes.items():
        if name not in unused and node.spec.traits.impact != "safe" and nodes.setdefault(node.spec.use, node) != node:
            _refuse(node, "use", f"is a second node with use = {node.spec.use!r}")
        if name not in unused:
            _check_is_covered(node)
    model, corpus, batch = (_find_node(nodes, uses) for uses in (MODELS, COVERED["corpora"], ("run.batch",)))
    _find_node(nodes, ("optim.adamw",))
    constants = {
        constant: FlatConstant(node.settings[key], f"[{node.name}] {key}, {describe_provenance(graph, node, key)}")
        for use, node in nodes.items()
        for key, constant in CONSTANTS.get(use, {}).items()
    }
    schedule = next((node for use, node in nodes.items() if use.startswith("learning_rate.")), None)
    built = recipe.open([model.name, *([schedule.name] if schedule else [])])
    built.build()
    config = built[model.name].architecture
    values = {name: getattr(config, key) for key, name in SIZES.items()}
    values["MICROBATCH"] = choose_micro_size([constants["BATCH"].value], constants["MICROBATCH"].value, 1)
    constants = {name: item._replace(value=values.get(name, item.value)) for name, item in constants.items()}
    constants["END_TOKEN"] = FlatConstant(256, f"[{_find_node(nodes, ('data.bytes',)).name}] the end of a document")
    tokens = constants["MICROBATCH"].value * constants["LENGTH"].value
    if tokens > max(MAX_MICROBATCH_TOKENS, MAX_MICROBATCH_LOGITS // config.vocab_size):
        _refuse(batch, "micro_size", f"has microbatches of {tokens:,} tokens")
    features = {corpus.spec.use.rpartition(".")[2], "tied" if config.tie_word_embeddings else "untied"}
    features |= {"qk_norm"} if config.qk_norm == "head" else set()
    features |= {"clip"} if "MAX_NORM" in constants else set()
    lines = (
        ["return 1.0"]
        if schedule is None
        else _write_schedule(schedule, built[schedule.name], _find_node(nodes, ("run.trainer",)).settings["steps"])
    )
    return Template(_select_lines(features)).substitute(
        recipe=Path(graph.recipe.source).stem,
        constants="\n".join(f"{name} = {item.value!r}  # {item.origin}" for name, item in constants.items()),
        data=_list_names([corpus, *(_find_node(nodes, (use,)) for use in COVERED["data"])]),
        model=f"[{model.name}] {model.spec.use}",
        loss=_list_names([_find_node(nodes, ("loss.next_token",))]),
        phases=_list_names(node for node in phases if node.spec.traits.impact != "safe"),
        lr_factor="\n".join(f"    {line}" for line in lines),
    )


def _check_is_covered(node: Node) -> None:
    """Raise UserError if a node, or a setting of it, could change losses and isn't in the template."""
    use, settings = node.spec.use, node.settings
    if use == "distributed.mesh":
        for size in PerDimension().settings():
            if settings[size] not in (1, "auto"):
                _refuse(node, size, f"has {size} = {settings[size]!r}")
    if use == "distributed.device" and settings["kind"] == "cuda":
        _refuse(node, "kind", "has kind = 'cuda'")
    if node.spec.traits.impact == "safe":
        return
    if use not in CONSTANTS and use not in OTHERS:
        _refuse(node, "use", f"has use = {use!r}")
    accepted = {*CONSTANTS.get(use, ()), *OTHERS.get(use, ())}
    for key, value in settings.items():
        field = node.spec.fields[key]
        if field.impact != "safe" and key not in accepted and value != field.default_value():
            _refuse(node, key, f"has {key} = {value!r}")


def _refuse(node: Node, key: str, what: str) -> NoReturn:
    """Raise UserError with the position of a setting."""
    position = node.position_of((key,))
    raise UserError(f"{position}: [{node.name}] {what}, which --source can't write as plain PyTorch for one CPU", 2)


def _find_node(nodes: Mapping[str, Node], uses: Sequence[str]) -> Node:
    """Return the node of one of these components. Raises UserError if there is none."""
    if (node := next((nodes[use] for use in uses if use in nodes), None)) is None:
        raise UserError(f"the recipe has no node with use = {' or '.join(uses)}, which --source writes", 2)
    return node


def _list_names(nodes: Iterable[Node]) -> str:
    """Return the names of nodes, as in the recipe."""
    return " ".join(f"[{node.name}]" for node in nodes)


def _select_lines(features: Collection[str]) -> str:
    """Return the template's lines for all runs and for these features, without their marks."""
    lines = []
    for line in TEMPLATE.read_text("utf-8").splitlines():
        mark = FEATURE.search(line)
        if mark is None or mark[1] in features:
            lines.append(line[: mark.start()] if mark else line)
    return "\n".join(lines) + "\n"


def _write_schedule(node: Node, schedule: Any, total: int) -> Iterator[str]:
    """Yield the lines of `lr_factor`, in the order of operations of components/learning_rate."""
    yield f"# [{node.name}] {node.spec.use}, {node.position}"
    if node.spec.use != "learning_rate.piecewise":
        if (warmup := schedule.count_warmup_steps(total)) > 0:
            start = 1 / warmup if schedule.start is None else schedule.start
            yield f"if done < {warmup}:"
            yield f"    return {start!r} + (1 - {start!r}) * done / {warmup}"
        progress = f"min((done - {warmup}) / {max(total - warmup, 1)}, 1.0)"
        is_cosine = node.spec.use == "learning_rate.cosine"
        yield f"return {_write_curve('cosine', 1.0, schedule.end, progress)}" if is_cosine else "return 1.0"
        return
    value, begin = schedule.start, 0
    for number, piece in enumerate(schedule.phases):
        if piece.until_tokens is not None or piece.curve not in ("linear", "cosine"):
            _refuse(node, "phases", f"has phases[{number}] = {piece}")
        end = max(begin, piece.compute_end_step(begin, total, None))
        value = piece.to / max(end, 1) if value is None else value
        yield f"if done < {end}:"
        yield f"    return {_write_curve(piece.curve, value, piece.to, f'(done - {begin}) / {max(end - begin, 1)}')}"
        value, begin = piece.to, end
    yield f"return {value!r}"


def _write_curve(curve: str, start: float, end: float, progress: str) -> str:
    """Return the expression of a curve from `start` to `end`."""
    if curve == "linear":
        return f"{start!r} + ({end!r} - {start!r}) * ({progress})"
    return f"{end!r} + ({start!r} - {end!r}) * (1 + math.cos(math.pi * ({progress}))) / 2"
