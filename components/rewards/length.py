"""Penalty for length: the soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13)."""

from collections.abc import Iterator, Sequence

from drawloom import NodeView, Problem, between, component, setting
from drawloom.components.rewards.expected import Weighted
from drawloom.ports import MAX_LENGTH, Answer


@component
class Length(Weighted):
    """0 up to `max_tokens - buffer` tokens, from there falling to -1 at `max_tokens`, and -1 beyond."""

    max_tokens: int = setting(
        "length in tokens, with the end token, from which the score is -1", check=between(1, MAX_LENGTH)
    )
    buffer: int = setting("tokens over which the score falls from 0 to -1", check=between(1, MAX_LENGTH))

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a buffer longer than `max_tokens`."""
        buffer, limit = node.settings.get("buffer"), node.settings.get("max_tokens")
        if isinstance(buffer, int) and isinstance(limit, int) and buffer > limit:
            yield node.problem(
                "buffer", f"{buffer} tokens are more than max_tokens = {limit}", f"write buffer = {limit} or less"
            )

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        begin = self.max_tokens - self.buffer
        return [-min(1.0, max(0.0, (answer.tokens - begin) / self.buffer)) for answer in answers]
