"""The four folders at the root are one import package, in the tree and in the wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"graph", "components", "kernels", "recipes"}


def test_src_holds_three_files_and_a_link_to_each_folder() -> None:
    """The import package consists of links to the folders that people see."""
    package = ROOT / "src" / "drawloom"
    links = {path.name: path.readlink() for path in package.iterdir() if path.is_symlink()}
    files = {path.name for path in package.iterdir() if not path.is_symlink() and path.name != "__pycache__"}
    assert links == {name: Path("../..") / name for name in FOLDERS}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_graph_needs_no_torch() -> None:
    """Importing the graph layer leaves torch out."""
    code = "import sys, drawloom.graph, drawloom.graph.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


def test_constraints_pin_every_direct_dependency() -> None:
    """`make` installs the same releases everywhere, and pip has nothing to choose."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[<>=;\[ ]", words)[0].lower() for group in groups for words in group}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert wanted - pinned == {"triton"}, "write the release that `pip freeze` shows into constraints.txt"


def test_wheel_holds_every_module_and_recipe(tmp_path: Path) -> None:
    """What is installed from the wheel is what stands in the tree."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if name.endswith((".py", ".toml"))}
    stands = {
        f"drawloom/{p.relative_to(ROOT)}"
        for f in FOLDERS
        for p in (ROOT / f).rglob("*")
        if p.suffix in (".py", ".toml")
    }
    assert stands <= held
