"""Options for attention that differ between model families, but not between calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionOptions:
    """
    Scale and cap for the scores in a layer.

    Products of queries and keys are multiplied by `scale`, by default 1 / sqrt(head_dim). With a `softcap` (Gemma 2),
    scores become softcap * tanh(score / softcap) before the softmax.
    """

    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"the softcap of attention is {self.softcap}; write a number above 0, or None")

    def scale_for(self, head_dim: int) -> float:
        """Return the factor for scores, if queries have `head_dim` channels."""
        return float(head_dim**-0.5) if self.scale is None else self.scale


PLAIN_ATTENTION = AttentionOptions()
"""Scores are divided by sqrt(head_dim), and not capped."""
