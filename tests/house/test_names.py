"""A component's name is its path, and tests mirror the source tree."""

from pathlib import Path

from drawloom.graph.registry.registry import Registry

ROOT = Path(__file__).parents[2]
CATALOGUE = Registry.from_package("drawloom.components")


def test_every_file_with_a_component_holds_exactly_one() -> None:
    """Every component is named by its file's path, and has a one-line docstring and documented settings."""
    for name in CATALOGUE.names():
        spec = CATALOGUE.require(name)
        assert spec.summary.endswith("."), f"{name}: the docstring's first line is a sentence"
        assert not [f.name for f in spec.fields.values() if f.kind == "setting" and not f.doc], name


def test_every_folder_is_a_package() -> None:
    """Every source folder has __init__.py; otherwise the wheel would miss it."""
    folders = [path for floor in ("graph", "components", "kernels") for path in (ROOT / floor).rglob("*")]
    bare = [p for p in folders if p.is_dir() and p.name != "__pycache__" and not (p / "__init__.py").exists()]
    assert not bare


def test_tests_mirror_the_source_tree() -> None:
    """Tests of graph/toml/emit.py are tests/graph/toml/test_emit.py, or test_emit_<subject>.py if there are several."""
    tests = [
        path for floor in ("graph", "components", "kernels") for path in (ROOT / "tests" / floor).rglob("test_*.py")
    ]
    paths = [path.relative_to(ROOT / "tests") for path in tests]
    assert not [path for path in paths if not _has_source(path)]


def _has_source(test_path: Path) -> bool:
    words = test_path.stem.removeprefix("test_").split("_")
    stems = ["_".join(words[:length]) for length in range(1, len(words) + 1)]
    return any((ROOT / test_path.with_name(f"{stem}.py")).exists() for stem in stems)
