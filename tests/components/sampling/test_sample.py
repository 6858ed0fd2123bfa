"""The sample at the end of a run."""

import logging
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.ports.run import Randomness, RunFolder
from drawloom.components.sampling.sample import Sample
from drawloom.graph.testing import fake


def test_a_model_that_has_diverged_ends_no_run(tmp_path: Path, one_rank: Any) -> None:
    """In place of a text there is why it has none, and the step is finished: the report and the summary follow."""
    model = mock.Mock(infer=lambda tokens, shared: torch.full((1, tokens.shape[1], 257), math.nan))
    folder, randomness = fake(RunFolder, folder=tmp_path), fake(Randomness, stream=lambda name: torch.Generator())
    sample = Sample(model=model, tokenizer=Bytes(), folder=folder, randomness=randomness, mesh=one_rank)
    sample.run_after_training(3)
    written = (tmp_path / "sample.txt").read_text()
    assert written.startswith("# after step 3\n(no text can be sampled: the model's logits are not finite")
    assert sample.has_result_of_step(3)


def test_a_pipe_in_place_of_the_sample_is_replaced(tmp_path: Path, one_rank: Any) -> None:
    """A stranger's pipe in the run folder is not opened, and the sample is written in its place."""
    model = mock.Mock(infer=lambda tokens, shared: torch.zeros(1, tokens.shape[1], 257))
    folder, randomness = fake(RunFolder, folder=tmp_path), fake(Randomness, stream=lambda name: torch.Generator())
    sample = Sample(model=model, tokenizer=Bytes(), folder=folder, randomness=randomness, mesh=one_rank, tokens=1)
    os.mkfifo(tmp_path / "sample.txt")
    assert not sample.has_result_of_step(3)
    sample.run_after_training(3)
    assert sample.has_result_of_step(3) and not sample.has_result_of_step(4)


def test_the_beginning_of_a_sample_is_printed(tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A long text has its first 300 characters in the log, and all of it in the file."""
    logits = torch.zeros(1, 1, 257)
    logits[..., 97] = 99  # the letter a
    model = mock.Mock(infer=lambda tokens, shared: logits)
    folder, randomness = fake(RunFolder, folder=tmp_path), fake(Randomness, stream=lambda name: torch.Generator())
    sample = Sample(model=model, tokenizer=Bytes(), folder=folder, randomness=randomness, mesh=one_rank, tokens=400)
    with caplog.at_level(logging.INFO, "drawloom.run"):
        sample.run_after_training(3)
    assert (tmp_path / "sample.txt").read_text() == f"# after step 3\n{'a' * 400}\n"
    [message] = [record.getMessage() for record in caplog.records]
    assert message == f"a sample:\n{'a' * 300}\n... (400 characters in {tmp_path / 'sample.txt'})"
