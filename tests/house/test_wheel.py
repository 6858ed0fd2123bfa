"""A person who installs the wheel can train, without a clone and without the packages of `dev`."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = ("graph", "components", "kernels", "recipes")
SHORT = ["trainer.steps=2", "model.num_hidden_layers=1", "sample.tokens=4"]
RUN_FILES = {"recipe.lock.toml", "metrics.jsonl", "checkpoints", "export", "sample.txt", "report.html", "log"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_wheel_contains_every_module_and_recipe(wheel: Path) -> None:
    """The wheel contains every Python module and TOML file of the four folders."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml"))
    assert {f"drawloom/{path.relative_to(ROOT)}" for path in paths} <= packed


def test_wheel_trains_the_first_run_with_only_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    """`drawloom run first_run` works from an empty folder if only the wheel and its dependencies are installed."""
    environment = create_environment(tmp_path / "environment")
    install(environment, "--no-deps", "--no-index", "--no-compile", str(wheel))
    link_dependencies(environment)
    assert not has_module(environment, "pytest"), "packages of `dev` are importable"
    check_first_run(environment, tmp_path, *SHORT)


@pytest.mark.soak  # pip downloads torch, and the run takes minutes
def test_pip_installs_all_that_the_first_run_needs(wheel: Path, tmp_path: Path) -> None:
    """The unabridged first run works in a virtual environment into which pip has installed the wheel."""
    environment = create_environment(tmp_path / "environment")
    install(environment, "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    check_first_run(environment, tmp_path)


def create_environment(folder: Path) -> Path:
    """Create a virtual environment without any package."""
    venv.create(folder, symlinks=True)
    return folder


def install(environment: Path, *arguments: str) -> None:
    """Install packages into a virtual environment without pip of its own."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, *arguments], check=True)


def link_dependencies(environment: Path) -> None:
    """Link the dependencies of the installed wheel into a virtual environment, from the environment of the tests."""
    target = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    [drawloom] = Distribution.discover(name="drawloom", path=[str(target)])
    for dependency in dependencies(drawloom):
        for name in {path.parts[0] for path in dependency.files or ()} - {"..", "__pycache__"}:
            if not (target / name).exists():
                (target / name).symlink_to(str(dependency.locate_file(name)))


def dependencies(package: Distribution) -> list[Distribution]:
    """Return the distributions a package needs, directly or indirectly, without extras."""
    needed: dict[str, Distribution] = {}
    pending = [package]
    while pending:
        for requirement in map(Requirement, pending.pop().requires or ()):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and requirement.name not in needed:
                needed[requirement.name] = distribution(requirement.name)
                pending.append(needed[requirement.name])
    return list(needed.values())


def has_module(environment: Path, name: str) -> bool:
    """Return whether a module can be imported in a virtual environment."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([environment / "bin" / "python", "-c", code], env={}).returncode == 0


def check_first_run(environment: Path, folder: Path, *overrides: str) -> None:
    """Run `drawloom run first_run` in an empty folder and check that it succeeds and writes its files."""
    empty = folder / "empty"
    empty.mkdir()
    variables = {"PATH": f"{environment / 'bin'}{os.pathsep}{os.defpath}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = ["drawloom", "run", "first_run", *overrides]
    done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "results in runs/first_run" in done.stdout + done.stderr
    assert {path.name for path in (empty / "runs" / "first_run").iterdir()} >= RUN_FILES
