"""The standard library as a corpus."""

import json
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from drawloom.components.data.standard_library import StandardLibrary, source_files
from drawloom.graph import UserError


def test_library_without_its_tests_and_what_was_installed() -> None:
    """Modules of packages are there; tests, installed packages and generated files are not."""
    names = [file.name for file in source_files()]
    assert {"json/decoder.py", "ast.py", "unittest/case.py"} <= set(names)
    assert names == sorted(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(part.startswith("_sysconfigdata") for part in parts)


def test_every_module_is_a_document_of_one_split() -> None:
    """Both splits together are the modules, each once, and about one in twenty is held out."""
    library = StandardLibrary()
    train, held_out = list(library.documents("train")), list(library.documents("validation"))
    texts = [file.path.read_bytes().decode("utf-8", "replace") for file in source_files()]
    assert Counter(train + held_out) == Counter(texts)
    assert 0.02 < len(held_out) / len(texts) < 0.1
    assert Path(json.__file__).read_bytes().decode() in train + held_out


def test_python_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library has no source, an error names the folder and another corpus."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(UserError, match=r"without its source.*data\.text_files"):
        list(StandardLibrary().documents("train"))


def test_only_folders_below_the_library_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that itself lies in a folder named `test` is a corpus like any other."""
    root = tmp_path / "test" / "lib"
    (root / "test").mkdir(parents=True)
    (root / "a.py").write_text("a")
    (root / "test" / "b.py").write_text("b")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(root))
    assert list(StandardLibrary(validation_fraction=0.0).documents("train")) == ["a"]
