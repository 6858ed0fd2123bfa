"""`drawloom why` finds differences planted in runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.runs import drawloom, rows, take_back

DROP = '''
import torch

from drawloom import component, setting
from drawloom.ports import Parameters, Step


@component(changes=("gradients",))
class GradientDropout:
    """Dropout of gradients."""

    parameters: Parameters
    seed: int = setting(default=0, doc="seed")

    def run_phase(self, step: Step) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + step.index)
        for _, parameter in self.parameters.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.rand(parameter.grad.shape, generator=generator) > 0.1)
'''
KERN = '''
import torch

from drawloom import component
from drawloom.components.kernels.auto import AutoKernels


@component
class Kernels(AutoKernels):
    """Kernels with another rounding in SwiGLU."""

    def swiglu(self, gate, up, scale=None):
        return torch.nn.functional.silu(gate) * up * (1 + 2**-20)
'''
IMPORTS = ("--import", "drop.py", "--import", "kern.py")
WORDS = ("trainer.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "drop.use=drop", "trainer.on_finish=[]")
DROPPED = "edit.trainer.phases.before.@clip=@drop"


@pytest.fixture
def runs(folder: Path) -> Path:
    """A folder with the run `base`, whose gradients have dropout."""
    (folder / "drop.py").write_text(DROP, "utf-8")
    (folder / "kern.py").write_text(KERN, "utf-8")
    train(folder, "base")
    return folder


def train(folder: Path, name: str, *words: str, ranks: int = 1) -> None:
    """Run or resume a variant of the base run."""
    command = ("run", "tiny.toml", *IMPORTS, f"run.name={name}", *WORDS, DROPPED, *words, "--accept-changes")
    for outcome in drawloom(folder, *command, ranks=ranks):
        assert outcome.code == 0, outcome.text


def why(folder: Path, other: str, *words: str) -> dict[str, Any]:
    """Return the JSON about the base run and another one."""
    command = ("why", "runs/base", f"runs/{other}", *IMPORTS, *words, "--format", "json")
    outcome = drawloom(folder, *command, path=str(folder))[0]
    assert outcome.code == 0, outcome.text
    answer: dict[str, Any] = json.loads(outcome.text[outcome.text.index("{\n") :])
    return answer


def test_another_seed_of_dropout_is_found_after_a_checkpoint(runs: Path) -> None:
    """
    The runs are equal until a resume with another seed. Their steps are repeated from the checkpoint before it, and the
    seed alone is the cause, though the learning rate's metric name differs, too. Equal runs have no difference.
    """
    shutil.copytree(runs / "runs/base", runs / "runs/seed")
    take_back(runs / "runs/seed", 4)
    train(runs, "seed", "drop.seed=7", "evaluate.every=3")
    answer = why(runs, "seed")
    assert (answer["step"], answer["phase"], answer["source"]) == (5, "drop", "replay")
    assert answer["tensors"][0] == "gradient of model.embed_tokens.weight"
    assert answer["causes"] == [{"key": "drop.seed", "one": "0", "other": "7"}]
    assert {setting["key"] for setting in answer["settings"]} == {"drop.seed", "evaluate.every"}
    assert answer["environment"] == [] and rows(runs / "runs/base")[3] != rows(runs / "runs/seed")[4]
    equal = why(runs, "base")
    assert equal["step"] is None and equal["notes"] == [
        "all recorded metrics are equal in the 6 common steps, up to step 6"
    ]


@pytest.mark.parametrize(
    ("words", "phase", "tensor", "cause"),
    [
        (["kernels.use=kern"], "forward_backward", "gradient of model", "kernels.use"),
        (
            ["order.use=data.order.sorted_buffers", "order.buffer=16", "order.pack=4"],
            "the start of the step",
            "data",
            "order.use",
        ),
    ],
)
def test_planted_differences_are_found(runs: Path, words: list[str], phase: str, tensor: str, cause: str) -> None:
    """A changed kernel is seen first in gradients, and a changed row order in the state of the data."""
    train(runs, "other", *words)
    answer = why(runs, "other")
    assert (answer["step"], answer["phase"]) == (1, phase)
    assert answer["tensors"][0].startswith(tensor), answer["tensors"]
    assert cause in {setting["key"] for setting in answer["causes"]}


def test_recorded_hashes_need_no_replay(runs: Path) -> None:
    """Runs with the listener name phase and tensor; an environment recorded by another machine is shown."""
    listener = ("trace.use=checkpoint.phase_hashes", 'trainer.listeners=["@trace"]')
    for name, seed in (("one", 0), ("two", 7)):
        train(runs, name, *listener, f"drop.seed={seed}")
    environment = json.loads((runs / "runs/two/log/environment.json").read_text("utf-8"))
    changed = environment | {"kernels.attention": "cudnn"}
    (runs / "runs/two/log/environment.json").write_text(json.dumps(changed), "utf-8")
    shutil.rmtree(runs / "runs/base")
    (runs / "runs/one").rename(runs / "runs/base")
    answer = why(runs, "two")
    assert (answer["step"], answer["phase"], answer["source"]) == (1, "drop", "recorded hashes")
    assert answer["environment"] == [{"key": "kernels.attention", "one": "eager", "other": "cudnn"}]


@pytest.mark.soak
def test_runs_on_several_ranks_are_repeated_on_as_many(runs: Path) -> None:
    """Another seed of dropout is found after the common checkpoint by replays on two ranks, and as the cause."""
    shutil.rmtree(runs / "runs/base")
    train(runs, "base", "trainer.steps=3", "batch.micro_size=2", ranks=2)
    shutil.copytree(runs / "runs/base", runs / "runs/seed")
    take_back(runs / "runs/seed", 2)
    train(runs, "seed", "trainer.steps=3", "batch.micro_size=2", "drop.seed=7", ranks=2)
    answer = why(runs, "seed")
    assert (answer["step"], answer["phase"], answer["source"]) == (3, "drop", "replay"), answer
    gradient = "gradient of model.embed_tokens.weight"
    assert {gradient, f"rank 1: {gradient}"} <= {*answer["tensors"]}
    assert [setting["key"] for setting in answer["causes"]] == ["drop.seed"]
