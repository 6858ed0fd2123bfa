"""Copies of checkpoints in an object store."""

import itertools
import shutil
from pathlib import Path

import pytest

from drawloom.components.checkpoint.commit import list_checkpoints
from drawloom.components.checkpoint.mirror import RemoteCopy, fetch_run
from drawloom.components.checkpoint.reader import verify_checkpoint
from drawloom.components.storage.object_store import ObjectStore, StoreError
from drawloom.graph import UserError
from support.checkpoints import save_steps

fsspec = pytest.importorskip("fsspec", reason="needs the package fsspec: pip install 'drawloom[fsspec]'")
NUMBERS = itertools.count()


@pytest.fixture
def store() -> ObjectStore:
    """An empty store in memory."""
    return ObjectStore.open(f"memory://bucket/{next(NUMBERS)}")


def files(store: ObjectStore) -> list[str]:
    """Return all names in the checkpoints of a store."""
    folders = store.list_names("checkpoints")
    return [f"{folder}/{name}" for folder in folders for name in store.list_names(f"checkpoints/{folder}")]


def test_a_fetched_run_equals_the_copied_one(store: ObjectStore, tmp_path: Path) -> None:
    """The newest checkpoint, or that of a step, has the bytes of the run; removed checkpoints are removed."""
    run, other = tmp_path / "run", tmp_path / "other"
    save_steps(run, 1, 2)
    (run / "metrics.jsonl").write_text("{}\n", "utf-8")
    copy = RemoteCopy(store)
    assert copy.is_behind(run)
    copy.upload_changes_and_prune(run)
    assert not copy.is_behind(run)
    assert RemoteCopy(store).fetch_checkpoint(other) == 2 and RemoteCopy(store).fetch_checkpoint(other, 1) == 1
    for step in ("step-1", "step-2"):
        for file in (run / "checkpoints" / step).iterdir():
            assert file.read_bytes() == (other / "checkpoints" / step / file.name).read_bytes()
        verify_checkpoint(other / "checkpoints" / step)
    assert (other / "metrics.jsonl").read_text("utf-8") == "{}\n"
    assert [path.name for path in list_checkpoints(other / "checkpoints")] == ["step-1", "step-2"]
    shutil.rmtree(run / "checkpoints/step-1")
    copy.upload_changes_and_prune(run)
    assert store.list_names("checkpoints") == ["step-2"]


def test_a_checkpoint_without_a_manifest_does_not_count(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that breaks off leaves no manifest, whatever file it was at; the next one completes it."""
    run, put = tmp_path / "run", ObjectStore.upload
    save_steps(run, 1)
    whole = len(list((run / "checkpoints/step-1").iterdir()))
    for calls in range(whole):
        left = itertools.count(calls, -1)

        def put_some(store: ObjectStore, file: Path, name: str, left: "itertools.count[int]" = left) -> None:
            if next(left) == 0:
                raise StoreError("the store is full")
            put(store, file, name)

        with monkeypatch.context() as patch, pytest.raises(StoreError, match="the store is full"):
            patch.setattr(ObjectStore, "upload", put_some)
            RemoteCopy(store).upload_changes_and_prune(run)
        assert "step-1/manifest.json" not in files(store)
        assert RemoteCopy(store).fetch_checkpoint(tmp_path / "none") == 0
    RemoteCopy(store).upload_changes_and_prune(run)
    assert len(files(store)) == whole and RemoteCopy(store).fetch_checkpoint(tmp_path / "other") == 1


def test_damaged_copies_are_not_read(store: ObjectStore, tmp_path: Path) -> None:
    """An older whole checkpoint is read instead; if there is none, the error names the file."""
    run = tmp_path / "run"
    save_steps(run, 1, 2)
    RemoteCopy(store).upload_changes_and_prune(run)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"x")
    for step, expected in ((2, 1), (1, None)):
        store.upload(damaged, f"checkpoints/step-{step}/rank-0.safetensors")
        if expected:
            assert RemoteCopy(store).fetch_checkpoint(tmp_path / f"other{step}") == expected
    with pytest.raises(UserError, match=r"step-2: rank-0.safetensors has .*; step-1: rank-0.safetensors"):
        RemoteCopy(store).fetch_checkpoint(tmp_path / "third")
    with pytest.raises(UserError, match="has no checkpoint of step 9"):
        fetch_run(store.url, tmp_path / "fourth", 9)


def test_an_unknown_protocol_says_what_to_install() -> None:
    """The error names the extra and the protocol's package."""
    with pytest.raises(UserError, match=r"pip install 'drawloom\[fsspec\]'"):
        ObjectStore.open("nothing://bucket")
