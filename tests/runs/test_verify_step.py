"""`drawloom verify --step` finds a flipped bit in a recorded step."""

import json
from pathlib import Path
from typing import Any

from support.runs import drawloom

FLIP = '''
from pathlib import Path

from drawloom import component
from drawloom.ports import Parameters, Step


@component(changes=("gradients",), impact="safe")
class Flip:
    """A flip of the lowest bit of one gradient in step 5, while the file `flip` exists."""

    parameters: Parameters

    def run_phase(self, step: Step) -> None:
        name, parameter = next(iter(self.parameters.named_parameters()))
        if step.index == 5 and Path("flip").exists():
            parameter.grad.view(-1).view(dtype=__import__("torch").int32)[7] ^= 1
'''
IMPORTS = ("--import", "flip.py")
WORDS = ("trainer.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "flip.use=flip", "trainer.on_finish=[]")
HASHES = ("listeners.trace.use=checkpoint.phase_hashes",)


def _verify(folder: Path, step: int, code: int) -> dict[str, Any]:
    """Return the JSON about a step."""
    words = ("verify", "runs/tiny", "--step", str(step), *IMPORTS, "--format", "json")
    [outcome] = drawloom(folder, *words)
    assert outcome.code == code, outcome.text
    answer: dict[str, Any] = json.loads(outcome.text[outcome.text.index("{\n") :])
    return answer


def test_a_flipped_bit_is_found_in_its_step_and_phase(folder: Path) -> None:
    """One lowest bit of one gradient differs; earlier steps are as recorded, and the replay is deterministic."""
    (folder / "flip.py").write_text(FLIP, "utf-8")
    (folder / "flip").touch()
    [outcome] = drawloom(
        folder, "run", "tiny.toml", *IMPORTS, *WORDS, *HASHES, "edit.trainer.phases.before.@clip=@flip"
    )
    assert outcome.code == 0, outcome.text
    (folder / "flip").unlink()
    answer = _verify(folder, 5, 1)
    assert (answer["start"], answer["different_step"], answer["phase"]) == (4, 5, "flip")
    assert len(answer["tensors"]) >= 1 and all("gradient" in name for name in answer["tensors"])
    assert answer["deterministic"] is True
    answer = _verify(folder, 4, 0)
    assert (answer["start"], answer["different_step"], answer["metrics"]) == (2, None, [])
    assert answer["compared"] > 100 and answer["deterministic"] is None
    [outcome] = drawloom(folder, "verify", "runs/tiny", "--step", "9", *IMPORTS)
    assert outcome.code == 2 and "no record of this step; the last one is step 6" in outcome.text
