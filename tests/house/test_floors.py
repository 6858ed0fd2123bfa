"""
Allowed imports between folders.

Read FLOORS from the ground up: a folder may import itself, the folders named beside it, and the listed third parties;
the standard library is free to all. No subject imports another: they meet in `ports`, and the recipe introduces them.
A new folder under components/ is born a subject.
"""

import ast
import sys
from pathlib import Path

import drawloom

ROOT = Path(__file__).parents[2]
NAME = "drawloom"
PUBLIC = {"models": "components.model", "ports": "components.ports"}
PUBLIC |= dict.fromkeys({*drawloom.__all__} - {"models", "ports", "reward", "testing"}, "graph")
"""Where the public names of components' authors are, by their names in `drawloom`."""

LIBRARIES = {
    "components.ports",
    "components.state",
    "components.storage",
    "components.weights",
    "components.distributed",
    "components.parallel",
}
BELOW = {"graph", *LIBRARIES}
TOOLS = {"components.commands", "components.planning", "components.proving", "graph.lsp"}

FLOORS: dict[str, tuple[set[str], set[str]]] = {
    "graph": (set(), {"attrs", "cattrs", "tomli", "rich"}),
    # An extra, imported by `drawloom lsp` alone.
    "graph.lsp": ({"graph"}, {"attrs", "tomli", "lsprotocol", "pygls"}),
    "kernels": (set(), {"torch", "triton"}),
    "components": (set(), set()),
    # Values of a step know nothing of training.
    "components.state": (set(), {"attrs", "torch"}),
    # Options and results of an operation, and formats of weights, are classes of the kernels, which ports name.
    # Samplers and losses have the same bits by one formula of a log-sum-exp.
    "components.ports": (
        {
            "graph",
            "components.state",
            "kernels.attention.options",
            "kernels.cross_entropy.logsumexp",
            "kernels.results",
            "kernels.weight_formats",
        },
        {"attrs", "numpy", "torch"},
    ),
    "components.contracts": (
        {"graph", "components.ports", "components.state", "kernels.attention.options", "kernels.results"},
        {"attrs", "numpy", "torch"},
    ),
    "components.storage": (
        {"graph", "components.ports", "components.state"},
        {"attrs", "fsspec", "torch", "safetensors"},
    ),
    "components.weights": (
        {"graph", "components.ports", "components.state", "components.storage", "kernels.weight_formats"},
        {"attrs", "torch"},
    ),
    "components.distributed": ({"graph", "components.ports", "components.state"}, {"attrs", "numpy", "torch"}),
    # Gradients that ranks sent are added up in one way.
    "components.parallel": (
        {
            "graph",
            "components.ports",
            "components.state",
            "components.storage",
            "components.weights",
            "components.distributed",
            "kernels.gradients.eager",
        },
        {"attrs", "torch"},
    ),
    "components.kernels": (BELOW | {"kernels"}, {"attrs", "torch"}),
    "components.rollouts": (BELOW | {"kernels.sampling"}, {"attrs", "numpy", "torch"}),
    "components.optim": (BELOW | {"kernels"}, {"attrs", "torch"}),
    # Angles of rotary positions and log-sum-exps come from one formula, of which there is no choice to make. Experts
    # have default dispatchers, for one rank and between ranks.
    "components.model": (
        BELOW
        | {
            "kernels.attention.options",
            "kernels.cross_entropy.logsumexp",
            "kernels.recompute",
            "kernels.results",
            "kernels.rope.frequencies",
            "components.experts.all_to_all",
            "components.experts.local",
        },
        {"attrs", "torch"},
    ),
    # Models of transformers, which are compared with plain operations.
    "components.model.fallback": (
        BELOW | {"components.model", "kernels.attention", "kernels.attention.options", "kernels.linear"},
        {"attrs", "torch", "transformers"},
    ),
    # Layers whose exchanges run beside their products take the place of layers.
    "components.overlap": (
        BELOW
        | {"components.model", "kernels.deferred_grads", "kernels.gradients.eager", "kernels.linear"}
        | {"kernels.operation"},
        {"attrs", "torch"},
    ),
    # Layers with products in float8 take the place of layers.
    "components.float8": (
        BELOW
        | {"components.experts.local", "components.model", "kernels.float8", "kernels.moe", "kernels.recompute"}
        | {"kernels.results"},
        {"attrs", "torch"},
    ),
    "components.frozen_weights": (
        BELOW | {"components.model", "kernels.host_copies", "kernels.weight_formats"},
        {"attrs", "torch"},
    ),
    # Replayed routes are a metric, too: sums over a step's passes.
    "components.experts": (BELOW | {"components.metrics.pass_sums"}, {"attrs", "torch"}),
    # An extra, imported by a process of its own.
    "components.environments": (BELOW, {"attrs", "numpy", "verifiers"}),
    # An extra, imported when a reward for JSON opens.
    "components.rewards": (BELOW, {"attrs", "jsonschema", "torch"}),
    # Adapters take the place of layers.
    "components.adapters": (BELOW | {"components.model"}, {"attrs", "torch"}),
    # A factor that the device alone knows is applied in one way.
    "components.gradients": (BELOW | {"kernels.gradients.eager"}, {"attrs", "numpy", "torch"}),
    # The executor decides which operations are deferred or recomputed.
    "components.pipeline": (
        BELOW | {"kernels.deferral", "kernels.deferred_grads", "kernels.host_copies", "kernels.recompute"},
        {"attrs", "numpy", "torch"},
    ),
    # The stages of a rank follow from the schedule's program.
    "components.stages": (
        BELOW | {"components.pipeline.program", "kernels.recompute.policy"},
        {"attrs", "torch"},
    ),
    # A plan runs stages without memory, as a run does, and simulates their schedule; a calibration times kernels.
    "components.planning": (
        BELOW | {"components.pipeline", "components.stages", "kernels"},
        {"attrs", "numpy", "torch"},
    ),
    # A proof records whole runs in processes of its own, and checks the contracts of ports.
    "components.proving": (
        BELOW | {"components.checkpoint.commit", "components.phases.report", "components.phases.step_reports"},
        {"attrs", "safetensors", "torch"},
    ),
    "components.checkpoint": (BELOW, {"attrs", "torch"}),
    # A report puts together what several subjects have left in a run folder, and draws the schedule.
    "components.report": (
        BELOW
        | {
            "components.checkpoint.commit",
            "components.checkpoint.reader",
            "components.pipeline.program",
            "components.pipeline.simulation",
            "components.run.locks",
        },
        {"attrs", "numpy"},
    ),
    "components.trackers": (BELOW, {"attrs", "aim", "mlflow", "torch", "trackio", "wandb"}),
    "components.data": (
        BELOW,
        {"attrs", "numpy", "torch", "tokenizers", "transformers", "pyarrow", "fsspec", "jinja2"},
    ),
    "components.run": (BELOW, {"attrs", "numpy", "torch"}),
    "components.listeners": (BELOW, {"attrs", "torch", "rich"}),
    # Commands are not components; they combine several subjects for a user.
    "components.commands": (
        BELOW
        | {"kernels.float8"}
        | {
            f"components.{name}"
            for name in (
                "checkpoint",
                "data",
                "export",
                "float8",
                "pipeline",
                "planning",
                "proving",
                "report",
                "sampling",
                "stages",
            )
        },
        {"attrs", "lm_eval", "mcp", "numpy", "rich", "tomli", "torch", "yaml"},
    ),
}
SUBJECT = (BELOW, {"attrs", "numpy", "torch"})

SOURCES = sorted(path for floor in ("graph", "kernels", "components") for path in (ROOT / floor).rglob("*.py"))


def home(path: Path) -> str:
    """Return the floor or subject of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inner, room = ".".join(parts[:3]), ".".join(parts[:2])
    if inner in FLOORS:
        return inner
    return room if room in FLOORS or (parts[0] == "components" and len(parts) > 2) else parts[0]


def find_imports(path: Path) -> set[str]:
    """Return every module and member that a file imports, at its top or inside a function."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    froms = [f"{node.module}.{name.name}" for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    return set(froms) | {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}


def is_allowed(module: str, here: str) -> bool:
    """Return whether a floor or subject may import a module."""
    own_floors, libraries = FLOORS.get(here, SUBJECT)
    top, _, rest = module.partition(".")
    if top == NAME:
        head, dot, tail = rest.partition(".")
        rest = PUBLIC.get(head, head) + dot + tail
        return any(f"{rest}.".startswith(f"{floor}.") for floor in own_floors | {here})
    return top in libraries | sys.stdlib_module_names


def test_files_import_only_from_below() -> None:
    """A file imports its own subject, the folders below, and the third parties of its floor."""
    problems = [
        f"{path.relative_to(ROOT)}: {home(path)} may not import {module}"
        for path in SOURCES
        for module in sorted(find_imports(path))
        if not is_allowed(module, home(path))
    ]
    assert not problems, "\n".join(problems)


def test_core_imports_no_tool() -> None:
    """Tools import the core, never the other way, so a run without tools loads none."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in SOURCES
        for module in sorted(find_imports(path))
        if any(f"{module}.".startswith(f"{NAME}.{tool}.") for tool in TOOLS)
        and home(path) not in TOOLS
        and "commands" not in path.parts
    ]
    assert not wrong, "\n".join(wrong)


def test_annotations_can_be_read_at_run_time() -> None:
    """Ports' annotations are compared, so they use no name imported for type checkers alone."""
    read = [path for path in SOURCES if not home(path).startswith("components.") or home(path) == "components.ports"]
    assert [str(path.relative_to(ROOT)) for path in read if "TYPE_CHECKING" in path.read_text("utf-8")] == []
