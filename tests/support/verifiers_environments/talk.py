"""Environment of `verifiers`: it calls its tool for the model, until three turns have ended."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def look(length: int) -> str:
    """Return a text."""
    return "ab"[length % 2] * 2


def sum_lengths(completion: Any) -> float:
    """Return a quarter of the length of the model's turns."""
    return 0.25 * sum(len(message["content"]) for message in completion if message["role"] == "assistant")


class Talk(vf.ToolEnv):
    """Conversation by the length of turns; one length in four is an error."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        length = len(messages[-1]["content"])
        if length % 4 == 3:
            raise LookupError("no text of this length")
        return [await self.call_tool("look", {"length": length}, "0")]

    @vf.stop
    async def no_tools_called(self, state: Any) -> bool:
        return len(state["trajectory"]) == 3


def load_environment() -> Any:
    """Return the environment with short texts as prompts."""
    rows = [{"prompt": f"{number}>", "answer": ""} for number in range(40)]
    return Talk(tools=[look], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[sum_lengths]))
