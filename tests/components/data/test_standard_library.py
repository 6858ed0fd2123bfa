"""The standard library as a corpus."""

import json
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from drawloom.components.data.standard_library import StandardLibrary, list_source_files
from drawloom.graph import UserError


def test_tests_and_installed_packages_are_excluded() -> None:
    """Modules of packages are included; tests, installed packages and generated files are not."""
    names = [file.name for file in list_source_files()]
    assert {"json/decoder.py", "ast.py", "unittest/case.py"} <= set(names)
    assert names == sorted(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(part.startswith("_sysconfigdata") for part in parts)


def test_every_module_is_a_document_of_one_split() -> None:
    """Both splits together are the modules, each once, and about one in twenty is in the validation split."""
    library = StandardLibrary()
    train, validation = list(library.documents("train")), list(library.documents("validation"))
    texts = [Path(file.path).read_bytes().decode("utf-8", "replace") for file in list_source_files()]
    assert Counter(train + validation) == Counter(texts)
    assert 0.02 < len(validation) / len(texts) < 0.1
    assert Path(json.__file__).read_bytes().decode() in train + validation


def test_a_python_without_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder and another corpus."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(UserError, match=r"no source files.*data\.text_files"):
        list(StandardLibrary().documents("train"))


def test_only_folders_below_the_library_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in a folder named `test` is a corpus like any other."""
    root = tmp_path / "test" / "lib"
    (root / "test").mkdir(parents=True)
    (root / "a.py").write_text("a")
    (root / "test" / "b.py").write_text("b")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(root))
    assert list(StandardLibrary(validation_fraction=0.0).documents("train")) == ["a"]
