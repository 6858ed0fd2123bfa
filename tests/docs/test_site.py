"""The site is built offline without warnings, and documents all components, names and commands."""

import ast
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import drawloom
from drawloom.components.ports.run import EventKind
from drawloom.graph.cli.main import find_command_files
from drawloom.graph.project import Project
from generate.catalogue import specs
from generate.results import results_page
from generate.source import PORTS, STATE, modules
from generate.step import VALUES, step_page
from generate.uses import uses
from support.blocks import blocks

ROOT = Path(__file__).parents[2]
OFFLINE = """
import socket, sys
def refuse(*words): raise OSError("the site is built without a network")
socket.socket.connect = refuse
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the site, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    yield folder


@pytest.mark.soak  # the build takes half a minute
def test_every_component_and_setting_is_documented(site: Path) -> None:
    """Every component, with all its settings, is on its subject's page."""
    for spec in specs():
        page = (site / "reference" / "components" / f"{spec.use.partition('.')[0]}.html").read_text("utf-8")
        assert f'<h2 id="{spec.use.replace(".", "")}"' in page, spec.use
        names = [field.name for field in spec.fields.values() if field.kind == "setting"]
        assert all(f"<code>{name}</code>" in page for name in names), spec.use


@pytest.mark.soak  # the build takes half a minute
def test_every_public_name_is_explained(site: Path) -> None:
    """Ports are on the pages of ports, and all other public names on the page of the Python API."""
    ports = "".join(path.read_text("utf-8") for path in (site / "ports").glob("*.html"))
    sources = [module for file, module in modules().items() if file.startswith(PORTS) or file in STATE]
    defined = [name for module in sources for name in (*module.classes, *module.functions) if name[0] != "_"]
    assert [name for name in defined if f'id="{name.lower()}"' not in ports] == []
    python = (site / "reference" / "python.html").read_text("utf-8")
    names = [f"drawloom.{name}" for name in drawloom.__all__ if name[0] != "_"]
    names += [f"drawloom.testing.{name}" for name in drawloom.testing.__all__]
    names += [f"drawloom.models.{name}" for name in drawloom.models.__all__]
    assert [name for name in names if name not in python] == []


@pytest.mark.soak  # the build takes half a minute
def test_no_page_fetches_anything(site: Path) -> None:
    """Scripts, styles and pictures are files of the site, so that it works offline."""
    for path in site.rglob("*.html"):
        fetched = re.findall(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?https?:[^>]+>""", path.read_text("utf-8"))
        assert fetched == [], path


def test_every_command_has_an_example() -> None:
    """Every command has a heading and a block, which `tests/docs/test_blocks.py` runs."""
    page = ROOT / "docs" / "commands.md"
    assert re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE) == list(
        find_command_files(Project.from_package("drawloom"))
    )
    lines = [line.split() for block in blocks(page) for line in block.text.splitlines() if line.startswith("$ ")]
    assert {words[2] for words in lines} == set(find_command_files(Project.from_package("drawloom")))


def test_the_page_for_agents_names_commands_and_is_short() -> None:
    """AGENTS.md has at most fifty lines, and every command in it exists."""
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    named = {name for names in re.findall(r"`drawloom ([a-z|-]+)", text) for name in names.split("|")}
    assert len(text.splitlines()) <= 50 and len(named) > 10
    assert named <= set(find_command_files(Project.from_package("drawloom")))


def test_every_field_of_every_result_is_documented() -> None:
    """Every command has a section, and every row has a description."""
    page = results_page()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(find_command_files(Project.from_package("drawloom")))
    rows = [line for line in page.splitlines() if line.startswith("| `") and not line.endswith("field | type | |")]
    assert len(rows) > 150 and [row for row in rows if row.endswith("|  |")] == []


def test_values_and_events_of_a_step_are_all_described() -> None:
    """Every value that a component reads or writes, and every event, has a row."""
    page = step_page()
    assert all(f"| `{name}` |" in page for name in [*VALUES, *typing.get_args(EventKind)])
    row = next(line for line in page.splitlines() if line.startswith("| `gradients` |"))
    assert "gradients.synchronize" in row and "gradients.clip_norm" in row and "optim.adamw" in row
    assert "[`run.trainer`]" in next(line for line in page.splitlines() if line.startswith("| `phase_ended` |"))


@pytest.mark.parametrize(
    ("member", "function"),
    [
        (("Loss", "loss"), "StageRunner.forward"),
        (("Phase", "run_phase"), "Trainer._run_step"),
        (("Metric", "measure_on_rank"), "reduce_metrics_over_ranks"),
        (("Tracker", "track"), "send_measurements"),
        (("DistributionTracker", "track_distributions"), "send_measurements"),
        (("Kernels", "rms_norm"), "RMSNorm.forward"),
        (("Executor", "evaluate"), "_measure_loss"),
        (("Group", "sum"), "Evaluate._measure_means_per_token"),
        (("MemoryUser", "device_bytes"), "sum_memory_by_kind"),
    ],
)
def test_users_of_a_member_are_found(member: tuple[str, str], function: str) -> None:
    """Users are found by fields, loops, arguments, call results, passed functions, `isinstance` and attributes."""
    assert function in [use.function for use in uses()[member]]


def test_nearly_every_member_of_a_port_has_a_user() -> None:
    """Few members have no user, so the search for users keeps up with the source."""
    members = [
        (name, function.name)
        for file, module in modules().items()
        if file.startswith(PORTS)
        for name, node in module.classes.items()
        if any("port" in ast.unparse(mark) for mark in node.decorator_list)
        for function in node.body
        if isinstance(function, ast.FunctionDef)
    ]
    unused = [member for member in members if member not in uses()]
    assert len(members) > 120 and len(unused) <= 8, sorted(unused)
