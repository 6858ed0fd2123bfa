"""The four folders at the root are one import package, in the tree and in the wheel."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"graph", "components", "kernels", "recipes"}


MODULES = ("__init__.py", "__main__.py", "models.py", "ports.py", "pytest_plugin.py", "testing.py")


def test_src_contains_public_modules_and_folder_links() -> None:
    """The import package contains the public modules and links to the four folders, and nothing else."""
    package = ROOT / "src" / "drawloom"
    links = {path.name: path.readlink() for path in package.iterdir() if path.is_symlink()}
    files = {path.name for path in package.iterdir() if not path.is_symlink() and path.name != "__pycache__"}
    assert links == {name: Path("../..") / name for name in FOLDERS}
    assert files == {*MODULES, "foreign_names.toml", "py.typed"}


def test_graph_needs_no_torch() -> None:
    """Importing the graph layer or drawloom.Recipe does not import torch; listing the commands imports none."""
    code = "import sys, contextlib, drawloom.graph, drawloom.graph.cli.main, drawloom.testing; drawloom.Recipe\n"
    code += "with contextlib.suppress(SystemExit): drawloom.graph.cli.main.main(['--help'])\n"
    code += "sys.exit('torch' in sys.modules or any('.commands.' in name for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


def test_constraints_pin_every_direct_dependency() -> None:
    """constraints.txt pins every dependency in pyproject.toml, so that `make` installs the same releases everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[<>=;\[ ]", words)[0].lower() for group in groups for words in group}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert wanted - pinned == {"triton"}, "write the release that `pip freeze` shows into constraints.txt"


def test_every_public_name_is_found_at_its_first_use() -> None:
    """`import drawloom` imports no submodule, and every name in `__all__` exists with a docstring."""
    code = "import sys, drawloom; assert 'drawloom.graph' not in sys.modules;"
    code += "assert all(getattr(drawloom, name).__doc__ for name in drawloom.__all__);"
    code += "assert set(drawloom.__all__) == set(dir(drawloom)); hasattr(drawloom, 'Graph') and sys.exit(1)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


def test_every_port_is_public() -> None:
    """
    `drawloom.ports` has all modules with ports, step state, and kernels' options and results.

    Ports of reinforcement learning are imported at their first use.
    """
    tree = ast.parse((ROOT / "src/drawloom/ports.py").read_bytes())
    imported = [f"{node.module}" for node in tree.body if isinstance(node, ast.ImportFrom)]
    late = ["rollouts", "shared_texts"]
    code = "import sys, drawloom.ports; assert not any(name.endswith('.rollouts') for name in sys.modules);"
    code += "from drawloom.ports import Environment, Rollouts; hasattr(drawloom.ports, 'Other') and sys.exit(1)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
    modules = {path.stem for path in (ROOT / "components" / "ports").glob("*.py")} - {"__init__", *late}
    plain = ["components.state.batch", "components.state.step_state"]
    plain += ["kernels.attention.options", "kernels.results"]
    assert imported == [
        f"drawloom.{name}" for name in (*(f"components.ports.{name}" for name in sorted(modules)), *plain)
    ]
