"""The result of a proof, for the terminal, for programs and for tests."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drawloom.graph.cli.command import FAILED, OK, Result, output, output_class

MAX_NAMES_SHOWN = 8


@output_class
class ProvedDifference:
    """The first value that differs from one process's."""

    step: int = output("step of the difference")
    phase: str = output("phase after which the value differs")
    name: str = output("name of the value, such as `the gradient of model.norm.weight`")
    error: float = output("relative error")
    cause: str = output("the mesh axis, and the operation that is most probably missing")

    def __str__(self) -> str:
        return f"step {self.step}, [{self.phase}], {self.name} ({100 * self.error:.2g} % off): {self.cause}"


@output_class
class ProveResult(Result):
    """The compared cases, and the first difference."""

    subject: str = output("the component or recipe")
    contracts: Sequence[str] = output("ports whose contracts the component keeps, up to the first broken one")
    broken_contract: str = output("the first broken property of a contract, or empty")
    equal: Sequence[str] = output("cases with one process's losses, gradients, weights, metrics and exports")
    failed: str = output("first case with another result, or empty")
    difference: ProvedDifference | None = output("the difference; null after a crash, or without a failure")
    crash: str = output("traceback of a case that crashed, or empty")
    refused: Mapping[str, str] = output("cases that the recipe does not permit, with the reason")
    untried: Sequence[str] = output("cases for which there was no time")
    uncompared: Sequence[str] = output("values that differ between two runs of one process")
    recipe: str = output("text of the smallest failing recipe, or empty")
    path: Path | None = output("file to which the recipe was written; null without a failure")
    seconds: float = output("time of the proof")

    @property
    def exit_code(self) -> int:
        """1 if a contract is broken or a case differs."""
        return FAILED if self.broken_contract or self.failed else OK

    def render(self, format: str) -> str:
        """Return the verdict, the cause, and what was not tried."""
        return "\n".join(self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        if self.broken_contract:
            yield f"{self.subject} breaks a contract: {self.broken_contract}"
        if self.difference is not None:
            at = f"step {self.difference.step}, after [{self.difference.phase}]"
            yield f"{self.subject} is wrong with {self.failed}"
            yield f"  {at}: {self.difference.name} is {100 * self.difference.error:.2g} % off"
            yield f"  {self.difference.cause}"
        elif self.failed:
            yield f"{self.subject} fails with {self.failed}"
            yield self.crash.rstrip()
        if self.path is not None:
            yield f"  the smallest failing recipe is in {self.path}"
        yield f"contracts kept: {', '.join(self.contracts) or 'none'}"
        yield f"like one process ({len(self.equal)}): {_join_names(self.equal)}"
        for reason in dict.fromkeys(self.refused.values()):
            names = [name for name in self.refused if self.refused[name] == reason]
            yield f"not permitted: {_join_names(names)}: {reason}"
        yield f"not tried: {_join_names(self.untried) if self.untried else 'nothing'}"
        if self.uncompared:
            yield f"not compared, since two runs of one process differ: {_join_names(self.uncompared)}"


def _join_names(names: Sequence[str]) -> str:
    more = f"; and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return "; ".join(names[:MAX_NAMES_SHOWN]) + more if names else "nothing"
