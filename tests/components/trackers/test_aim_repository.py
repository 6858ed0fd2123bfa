"""The Aim repository of a run folder."""

from pathlib import Path

import pytest

from drawloom.components.trackers.aim import (
    find_run_hash,
    has_run_with_hash,
    open_or_create_aim_repository,
    prepare_run_for_writing,
    refuse_linked_repository,
)
from drawloom.graph import UserError


class Repo:
    """A stand-in for Aim's repository, as far as folders go."""

    dies = False

    @classmethod
    def from_path(cls, path: str, init: bool = False) -> str:
        if init:
            (Path(path) / ".aim").mkdir()
            if cls.dies:
                raise KeyboardInterrupt
            (Path(path) / ".aim" / "VERSION").write_text("1")
        return path


class Aim:
    """A double of the package."""

    Repo = Repo


def test_a_repository_is_created_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while Aim creates one leaves none; the next start creates it and removes the leftovers."""
    monkeypatch.setattr(Repo, "dies", True)
    with pytest.raises(KeyboardInterrupt):
        open_or_create_aim_repository(Aim, tmp_path)
    assert not (tmp_path / ".aim").exists()
    monkeypatch.setattr(Repo, "dies", False)
    assert open_or_create_aim_repository(Aim, tmp_path) == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".aim"]
    assert (tmp_path / ".aim" / "VERSION").exists()


def test_an_existing_repository_is_not_recreated(tmp_path: Path) -> None:
    """No temporary repository is made."""
    (tmp_path / ".aim").mkdir()
    open_or_create_aim_repository(Aim, tmp_path)
    assert not list((tmp_path / ".aim").iterdir())


def test_a_shared_repository_may_be_created_by_another_run_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is made; the first run's repository is kept, and the other's is removed."""
    shared = tmp_path / "all" / "runs"
    create = Repo.from_path

    def create_late(path: str, init: bool = False) -> str:
        if init:
            create(str(shared), init=True)
            (shared / ".aim" / "VERSION").write_text("the first")
        return create(path, init)

    monkeypatch.setattr(Repo, "from_path", create_late)
    open_or_create_aim_repository(Aim, shared, is_shared=True)
    assert (shared / ".aim" / "VERSION").read_text() == "the first"
    assert [path.name for path in shared.iterdir()] == [".aim"]


def test_a_freed_run_appears_in_its_folder(tmp_path: Path) -> None:
    """There is no run before; afterwards the run is there, without its stale lock."""
    assert (find_run_hash(tmp_path), has_run_with_hash(tmp_path, "abc")) == ("", False)
    locks = tmp_path / ".aim" / "locks"
    locks.mkdir(parents=True)
    (locks / "abc.softlock").write_text("1-2-3")
    for _ in range(2):
        prepare_run_for_writing(tmp_path, "abc")
        assert (find_run_hash(tmp_path), has_run_with_hash(tmp_path, "abc"), has_run_with_hash(tmp_path, "ab")) == (
            "abc",
            True,
            False,
        )
    assert not list(locks.iterdir())


def test_a_repository_elsewhere_is_refused(tmp_path: Path) -> None:
    """A link in the place of the repository is an error, whether it leads anywhere or not; a folder is none."""
    for name in ("elsewhere", "nowhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".aim").symlink_to(tmp_path / "other")
        with pytest.raises(UserError, match="symbolic link"):
            refuse_linked_repository(tmp_path / name)
        (tmp_path / "other").mkdir(exist_ok=True)
    refuse_linked_repository(tmp_path)
    (tmp_path / ".aim").mkdir()
    refuse_linked_repository(tmp_path)
