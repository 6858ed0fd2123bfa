"""The sample at the end of a run."""

import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

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
    sample.finish(3)
    written = (tmp_path / "sample.txt").read_text()
    assert written.startswith("# after step 3\n(no text can be sampled: the model's logits are not finite")
    assert sample.is_finished(3)


def test_a_pipe_in_place_of_the_sample_is_replaced(tmp_path: Path, one_rank: Any) -> None:
    """A pipe that a stranger has put into the run folder is not opened, and the sample is written in its place."""
    model = mock.Mock(infer=lambda tokens, shared: torch.zeros(1, tokens.shape[1], 257))
    folder, randomness = fake(RunFolder, folder=tmp_path), fake(Randomness, stream=lambda name: torch.Generator())
    sample = Sample(model=model, tokenizer=Bytes(), folder=folder, randomness=randomness, mesh=one_rank, tokens=1)
    os.mkfifo(tmp_path / "sample.txt")
    assert not sample.is_finished(3)
    sample.finish(3)
    assert sample.is_finished(3) and not sample.is_finished(4)
