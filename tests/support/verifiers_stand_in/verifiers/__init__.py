"""Stand-in for the package `verifiers`: as much of it as `environments.verifiers` and the tests' environments use."""

import json
import logging
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from inspect import isawaitable, signature
from typing import Any

__version__ = "0.2.1"


class Client(ABC):  # noqa: B024 - classes are registered
    """Model for messages."""


class Message(dict[str, Any]):
    """Message whose keys are attributes, too."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Tool:
    """Description of a function whose parameters are integers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        properties = {name: {"type": "integer"} for name in signature(function).parameters}
        parameters = {"type": "object", "properties": properties, "required": [*properties]}
        self.fields = {"name": function.__name__, "description": function.__doc__, "parameters": parameters}

    def model_dump(self, exclude: set[str]) -> dict[str, Any]:
        assert exclude == {"strict"}
        return self.fields


class Rubric:
    """Weighted sum of reward functions; an error is logged, and its reward is 0."""

    def __init__(self, funcs: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")

    async def score(self, state: dict[str, Any]) -> float:
        rewards = [await self._call(func, state) for func in self.funcs]
        return sum(weight * reward for weight, reward in zip(self.weights, rewards, strict=True))

    async def _call(self, function: Callable[..., Any], state: dict[str, Any]) -> float:
        try:
            reward = function(**{name: state[name] for name in signature(function).parameters})
            return float(await reward if isawaitable(reward) else reward)
        except Exception as error:
            self.logger.error(f"Error calling reward function {function.__name__}: {error}")
            return 0.0


def stop(condition: Any) -> Any:
    """Mark a stop condition."""
    return condition


class Environment:
    """Environment with data and a rubric."""

    def __init__(self, rubric: Rubric, dataset: Any = None, eval_dataset: Any = None, max_turns: int = -1) -> None:
        self.rubric, self.dataset, self.eval_dataset, self.max_turns = rubric, dataset, eval_dataset, max_turns
        self.tool_defs: list[Tool] | None = None

    @property
    def requires_group_rollouts(self) -> bool:
        return any("completions" in signature(func).parameters for func in self.rubric.funcs)

    def get_dataset(self) -> Any:
        if self.dataset is None:
            raise ValueError("dataset is not set")
        return self.dataset

    def get_eval_dataset(self) -> Any:
        return self.get_dataset() if self.eval_dataset is None else self.eval_dataset


class MultiTurnEnv(Environment):
    """Environment with answers to the model's turns, by `env_response`."""

    async def setup_state(self, state: dict[str, Any]) -> None:
        """Prepare a conversation."""

    async def cleanup(self, state: dict[str, Any]) -> None:
        """End a conversation."""

    async def no_tools_called(self, state: dict[str, Any]) -> bool:
        return False

    async def env_response(self, messages: Any, state: dict[str, Any]) -> Any:
        raise NotImplementedError

    async def get_prompt_messages(self, state: dict[str, Any]) -> list[Message]:
        if not state["trajectory"]:
            prompt: list[Message] = state["prompt"]
            return prompt
        messages = self._join_last_turn(state)
        return messages + _normalize(await self.env_response(messages, state))

    def _join_last_turn(self, state: dict[str, Any]) -> list[Message]:
        turn = state["trajectory"][-1]
        return [*turn["prompt"], *turn["completion"]]

    async def run_rollout(self, row: dict[str, Any], client: Client, model: str, arguments: Any) -> dict[str, Any]:
        assert isinstance(client, Client)
        get_response: Any = vars(type(client))["get_response"]
        state = {"info": {}, **row, "prompt": _normalize(row["prompt"]), "trajectory": []}
        try:
            await self.setup_state(state)
            while len(state["trajectory"]) != self.max_turns and not await self.no_tools_called(state):
                prompt = await self.get_prompt_messages(state)
                response = await get_response(client, prompt=prompt, model=model, tools=None, state=state)
                state["trajectory"].append({"prompt": prompt, "completion": [response.message]})
        finally:
            await self.cleanup(state)
        state["completion"] = self._join_last_turn(state)[len(state["prompt"]) :]
        return {"reward": await self.rubric.score(state), "error": None}


class SingleTurnEnv(MultiTurnEnv):
    """Environment for one turn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, max_turns=1)


class ToolEnv(MultiTurnEnv):
    """Environment whose messages are results of tools; a turn without a call ends it."""

    def __init__(self, tools: Iterable[Callable[..., Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self.tool_map = {tool.__name__: tool for tool in tools}
        self.tool_defs = [Tool(tool) for tool in self.tool_map.values()]

    async def no_tools_called(self, state: dict[str, Any]) -> bool:
        return bool(state["trajectory"]) and not state["trajectory"][-1]["completion"][-1].tool_calls

    async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str) -> Message:
        return Message(role="tool", content=str(self.tool_map[tool_name](**tool_args)), tool_call_id=tool_call_id)

    async def env_response(self, messages: Any, state: dict[str, Any]) -> Any:
        return [await self._answer_call(call) for call in messages[-1].tool_calls]

    async def _answer_call(self, call: Any) -> Message:
        try:
            return await self.call_tool(call["name"], json.loads(call["arguments"]), call["id"])
        except Exception as error:
            return Message(role="tool", content=f"{error}", tool_call_id=call["id"])


def load_environment(name: str, **arguments: Any) -> Any:
    """Import a module and call its `load_environment`."""
    try:
        module = import_module(name)
    except ImportError as error:
        raise ValueError(f"Could not import '{name}' environment.") from error
    return module.load_environment(**arguments)


def _normalize(messages: Any) -> list[Message]:
    if isinstance(messages, str):
        return [Message(role="text", content=messages)]
    return [message if isinstance(message, Message) else Message(message) for message in messages]
