"""The run's name, folder and seed."""

from pathlib import Path

import pytest

from drawloom.components.run.job import NamedRun
from drawloom.graph import UserError


def test_the_folder_is_derived_from_the_name_by_default() -> None:
    """It is runs/ and the name, or the setting; nothing is made on disk."""
    assert NamedRun(name="first").folder_path == Path("runs/first")
    assert NamedRun(name="first", folder=Path("/elsewhere")).folder_path == Path("/elsewhere")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "a\0b"])
def test_a_name_is_a_plain_file_name(name: str) -> None:
    """Names leading out of runs/ and hidden names are refused."""
    with pytest.raises(ValueError, match="is not a plain file name"):
        NamedRun(name=name)


def test_a_name_is_not_longer_than_names_of_folders() -> None:
    """Bytes count, and the suffix of a sweep's folder fits, too."""
    assert NamedRun(name="é" * 120).name
    with pytest.raises(ValueError, match="the name has 242 bytes, and a folder's name may have 240"):
        NamedRun(name="é" * 121)


def test_a_path_as_a_name_is_answered_with_the_folder() -> None:
    """The message has both settings to write."""
    with pytest.raises(ValueError, match='write name = "b", and the path of the run folder as folder = "runs/a/b"'):
        NamedRun(name="a/b")


def test_a_seed_is_a_number_of_63_bits() -> None:
    """torch's generators take no negative seeds."""
    assert NamedRun(name="a", seed=2**63 - 1).seed == 2**63 - 1
    for seed, fault in ((-1, "-1 is less than 0"), (2**63, f"{2**63} is more than {2**63 - 1}")):
        with pytest.raises(ValueError, match=fault):
            NamedRun(name="a", seed=seed)


def test_a_moved_run_folder_is_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given folder wins over the recorded one; a folder or name on the command line wins over both."""
    monkeypatch.chdir(tmp_path)
    assert NamedRun.settings_to_stay_in_folder({"name": "a"}, [], "moved/a") == {"folder": "moved/a"}
    assert NamedRun.settings_to_stay_in_folder({"name": "a", "folder": "old"}, [], "moved/a") == {"folder": "moved/a"}
    assert NamedRun.settings_to_stay_in_folder({"name": "a"}, [], "runs/a/") == {}
    assert NamedRun.settings_to_stay_in_folder({"name": "a", "folder": "old"}, [], str(tmp_path / "old")) == {}
    assert NamedRun.settings_to_stay_in_folder({"name": "b", "folder": "new"}, ["name", "folder"], "runs/a") == {}
    assert NamedRun.settings_to_stay_in_folder({"name": "b"}, ["name"], "runs/a") == {}
    assert NamedRun.settings_to_stay_in_folder({"name": "b", "folder": "old"}, ["name"], "moved/a") == {
        "folder": "runs/b"
    }


def test_a_file_in_place_of_a_run_folder_is_refused(tmp_path: Path) -> None:
    """The problem is at the setting for it; a folder, or nothing yet, is fine."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^folder: .*file is a file; write the path of a folder"):
        NamedRun(name="x", folder=tmp_path / "file").open()
    for folder in (tmp_path, tmp_path / "new"):
        NamedRun(name="x", folder=folder).open()
