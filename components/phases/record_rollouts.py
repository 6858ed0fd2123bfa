"""Record of sampled completions, for people who watch a policy learn."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from drawloom import between, component, setting
from drawloom.components.phases.rollout import decode_segment
from drawloom.components.storage.step_log import StepLog, StepLogWriter
from drawloom.ports import (
    FAULTS,
    Cadence,
    Mesh,
    PolicyBatch,
    RunFolder,
    Scored,
    Step,
    Tokenizer,
    describe_cadence_fault,
    is_due,
)

FILE = "rollouts.jsonl"


@component(reads=("rollouts", "batches"), impact="safe")
class RecordRollouts(StepLogWriter):
    """
    Writer for `rollouts.jsonl` in the run folder: completions of some steps with rewards and advantages.

    A line is a step: `completions` have `prompt`, `completion`, `rewards` by name, their sum `reward`, `advantage`,
    `tokens`, and `stop`: "end", or "length" for a cut completion. They are the first rows on the first rank. The report
    shows the last line. A conversation also has `turns`, lists of "sampled" or "environment" with the text, and the
    counts of its `faults`; its `stop` may be "turns".
    """

    folder: RunFolder
    mesh: Mesh
    tokenizer: Tokenizer
    every: Cadence = setting(
        "steps between records, and the last one is recorded, too", default=10, check=describe_cadence_fault
    )
    rows: int = setting("completions in a record", default=4, check=between(1, 10_001))

    def run_phase(self, step: Step) -> None:
        """Append the step's first completions, if the step is recorded."""
        if self.mesh.world.rank or not is_due(self.every, step):
            return
        parts = zip(step.state["rollouts"], step.state["batches"], strict=True)
        rows = islice((row for scored, batch in parts for row in self._describe_completions(scored, batch)), self.rows)
        self.append({"step": step.index, "completions": [*rows]})

    def open_before(self, step: int) -> StepLog:
        return StepLog.open_before(self.folder.folder / FILE, step)

    def _describe_completions(self, scored: Scored, batch: PolicyBatch) -> Iterator[dict[str, Any]]:
        """Yield a microbatch's completions as JSON objects."""
        sampled, advantages = scored.completions, batch.advantages
        for row in range(len(sampled.tokens)):
            start, end, is_ended = (int(column[row]) for column in (sampled.starts, sampled.ends, sampled.is_ended))
            ids, scores, count = sampled.tokens[row], scored.scores[row].tolist(), int(sampled.sampled_counts[row])
            faults = {kind: count for kind, count in zip(FAULTS, sampled.faults[row].tolist(), strict=True) if count}
            segments = sampled.list_segments(row)[1:] if sampled.turns[row] or faults else ()
            texts = [(part.kind, decode_segment(self.tokenizer, sampled, row, part)) for part in segments]
            yield {
                "prompt": self.tokenizer.decode(ids[:start].tolist()),
                "completion": self.tokenizer.decode(ids[start : end - is_ended].tolist()),
                **({"turns": texts, "faults": faults} if texts else {}),
                "rewards": {name: _none_if_nan(score) for name, score in zip(scored.names, scores, strict=True)},
                "reward": _none_if_nan(float(scored.totals[row])),
                "advantage": None if advantages is None else float(advantages[row].sum() / max(1, count)),
                "tokens": count,
                "stop": "end" if is_ended else "turns" if "max_turns" in faults else "length",
            }


def _none_if_nan(value: float) -> float | None:
    return None if value != value else value
