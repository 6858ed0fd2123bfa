"""Private names of torch, looked up before a run starts."""

import ast
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from drawloom.components.distributed import torch_release
from drawloom.components.distributed.device import ComputeDevice
from drawloom.graph import UserError

ROOT = Path(__file__).parents[3]


def _import_gone(module: str) -> Callable[[], None]:
    return lambda: torch_release.import_private_name(module, "_gone")


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("torch._C._gone", lambda: ComputeDevice(kind="cpu").check_before_open()),
        ("torch.distributed.tensor._gone", _import_gone("torch.distributed.tensor")),
        ("torch.nowhere._gone", _import_gone("torch.nowhere")),
    ],
)
def test_a_torch_without_a_private_name_is_refused(
    name: str, start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the missing name and the release to install, before the device or a mesh is opened."""
    monkeypatch.setattr(torch_release, "PRIVATE_NAMES", (*torch_release.PRIVATE_NAMES, "_C._gone"))
    with pytest.raises(UserError) as caught:
        start()
    text = f"torch {torch.__version__} lacks {name}, which drawloom needs; drawloom is tested with torch >=2.11,<2.16: "
    assert str(caught.value) == text + "pip install 'torch>=2.11,<2.16'"


def test_the_releases_of_torch_are_bounded_by_the_tested_ones() -> None:
    """`pip install .` installs no release unknown to the tests."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch{torch_release.TESTED}" in dependencies


def _find_private_names(tree: ast.Module) -> Iterator[str]:
    """Yield torch's private names in a module's attributes of `torch`."""
    for node in ast.walk(tree):
        names, inner = list[str](), node
        while isinstance(inner, ast.Attribute):
            names, inner = [inner.attr, *names], inner.value
        if isinstance(inner, ast.Name) and inner.id == "torch" and names[-1:] != [] and names[-1].startswith("_"):
            yield ".".join(names)


def test_every_private_name_of_torch_is_looked_up() -> None:
    """A new use of a private name is in the table, too, except for parts of the names there and the version."""
    files = [path for folder in ("components", "kernels") for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in files for name in _find_private_names(ast.parse(path.read_text()))} - {"__version__"}
    parts = {name[:end] for name in torch_release.PRIVATE_NAMES for end in range(len(name) + 1)}
    assert used and used <= parts
