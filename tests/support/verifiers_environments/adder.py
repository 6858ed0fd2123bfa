"""Environment of `verifiers` with a tool and several turns; a row's `info` can name a fault."""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def is_correct(completion: Any, answer: str, info: Any) -> float:
    """Return 1 for the right answer at the end, and half of it for two turns."""
    if info.get("fault") == "rubric":
        raise LookupError("no judge")
    if info.get("fault") == "nan":
        return float("nan")
    return float(completion[-1]["content"] == answer)


async def count_turns(completion: Any) -> float:
    """Return the number of the model's turns."""
    return float(sum(message["role"] == "assistant" for message in completion))


class Adder(vf.ToolEnv):
    """Sums with a tool for them."""

    async def setup_state(self, state: Any) -> Any:
        if state.get("info", {}).get("fault") == "prompt":
            state["prompt"] = [*state["prompt"], *state["prompt"]]
        return await super().setup_state(state)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        match state.get("info", {}).get("fault"):
            case "raise":
                raise LookupError("no such page")
            case "exit":
                sys.exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "group killed":
                os.killpg(0, signal.SIGKILL)
            case "parent killed":
                os.kill(os.getppid(), signal.SIGKILL)
                raise LookupError("no parent")
            case "hang":
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                time.sleep(600)
            case "children":
                os.system(f"sleep 600 & echo $! > {state['info']['note']}")
                os._exit(3)
            case "slow":
                time.sleep(2)
            case "rewrite":
                messages[0].content = "another question"
            case "roles":
                return [{"role": "system", "content": "more"}, {"role": "user", "content": "more"}]
            case "silent":
                return []
            case "image":
                url = {"type": "image_url", "image_url": {"url": "data:,"}}
                return [{"role": "user", "content": [url]}]
            case "random":
                return [{"role": "user", "content": f"{random.random()} {numpy.random.random()}"}]
        return await super().env_response(messages, state)

    async def cleanup(self, state: Any, *arguments: Any) -> None:
        await super().cleanup(state, *arguments)
        if note := state.get("info", {}).get("note"):
            Path(note).write_text("clean", "utf-8")


def load_environment(rows: int = 3, evaluation_rows: int = 0, weight: float = 2.0) -> Any:
    """Return the environment with sums of equal numbers."""
    questions = [{"question": f"{n}+{n}=", "answer": f"{n + n}", "info": {"source": "drawn"}} for n in range(rows)]
    evaluation = questions[:evaluation_rows]
    return Adder(
        tools=[add],
        dataset=Dataset.from_list(questions) if questions else None,
        eval_dataset=Dataset.from_list(evaluation) if evaluation else None,
        rubric=vf.Rubric(funcs=[is_correct, count_turns], weights=[weight, 0.5]),
        max_turns=4,
    )
