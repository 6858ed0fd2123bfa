"""Completions to score, without a model."""

from typing import Any

from drawloom.components.ports.rollouts import Answer


def answer(text: str, tokens: int = 4, is_ended: bool = True, **example: Any) -> Answer:
    """Return a completion for a prompt whose example has these values."""
    return Answer(text, tokens, is_ended, {"source": "a.jsonl:3", **example})
