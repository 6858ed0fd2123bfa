"""A teacher's stored predictions."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.teacher_logps import TeacherLogps
from drawloom.components.weights.token_ids import read_tokenizer_ids
from drawloom.graph import UserError

ROWS: dict[str, Any] = {"seed": 5, "train": {"rows": 3, "sha256": "a"}, "validation": {"rows": 0, "sha256": "b"}}


def write(folder: Path) -> np.ndarray:
    """Write three rows of two positions with two tokens each, and return the ids."""
    ids = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    (folder / "train.ids").write_bytes(ids.tobytes())
    logps = -np.arange(18, dtype=np.float16).reshape(3, 2, 3)
    (folder / "train.logps").write_bytes(logps.tobytes())
    (folder / "teacher.json").write_text(json.dumps({"rows": ROWS, "tokenizer": "a", "length": 2, "top_k": 2}))
    return ids


def test_rows_are_read_by_number(tmp_path: Path) -> None:
    """Rows come in the order asked for, also after the component was sent to a worker process."""
    ids = write(tmp_path)
    teacher = TeacherLogps(path=tmp_path)
    for reader in (teacher, pickle.loads(pickle.dumps(teacher))):
        read, logps = reader.read_top_ids_and_logps("train", [2, 0])
        assert read.tolist() == ids[[2, 0]].tolist() and read.dtype == np.int64
        assert logps.shape == (2, 2, 3) and logps.dtype == np.float32 and logps[1, 0].tolist() == [0, -1, -2]


def test_predictions_of_other_rows_are_refused(tmp_path: Path) -> None:
    """Equal fingerprints of rows and ids pass; others end with the differing part; a missing folder is named."""
    write(tmp_path)
    teacher = TeacherLogps(path=tmp_path)
    teacher.check_written_for_rows(ROWS)
    with pytest.raises(UserError, match="seed is 5 there, and 6 here"):
        teacher.check_written_for_rows(ROWS | {"seed": 6})
    with pytest.raises(UserError, match="was written with another tokenizer"):
        TeacherLogps(path=tmp_path, tokenizer=Bytes()).check_before_open()
    ids = read_tokenizer_ids(Bytes())
    assert ids is not None
    manifest = json.loads((tmp_path / "teacher.json").read_text()) | {"tokenizer": ids.fingerprint}
    (tmp_path / "teacher.json").write_text(json.dumps(manifest))
    TeacherLogps(path=tmp_path, tokenizer=Bytes()).check_before_open()
    with pytest.raises(UserError, match="write them with `drawloom teacher-logps`"):
        TeacherLogps(path=tmp_path / "none").check_before_open()
