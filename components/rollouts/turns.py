"""
Conversations with an environment, by any sampler.

Nothing is rendered or encoded twice: a row keeps its sampled ids, and the environment's message is encoded
alone and put after them. Rendering a conversation again would change ids (Liu et al. 2026, verl#6854; TRL#6250).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from traceback import extract_tb

import attrs
import torch
from torch import Tensor

from drawloom import UserError, above, between, component, internal, setting, wired
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.ports import (
    FAULTS,
    ChatPrompts,
    Completions,
    Environment,
    Episode,
    Example,
    Group,
    Mesh,
    Prompts,
    Reply,
    Rollouts,
    SamplesInBackground,
    Tokenizer,
    run_log,
)

MAX_CHARACTERS = 10**6
"""Most characters in a message, which is rendered and encoded before its tokens can be counted."""

MAX_THREADS = 32
"""Rows whose turns are answered at the same time."""


@attrs.define(eq=False)
class Conversation:
    """A row's state in the environment: its total reward, NaN for none, its turns, and its faults by kind."""

    episode: Episode | None = None
    reward: float = math.nan
    turns: int = 0
    faults: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(FAULTS, 0))

    def ask(self, environment: Environment, example: Example, text: str) -> Reply:
        """Return the reply to a turn; the first one starts the conversation."""
        if self.episode is None:
            self.episode = environment.reset(example)
        return self.episode.step(text)

    def add(self, reply: Reply) -> None:
        """Add a reply's reward and faults. Raises ValueError unless the reward is finite."""
        if reply.reward is not None:
            if not math.isfinite(reply.reward):
                raise ValueError(f"the reward is {reply.reward}")
            self.reward = reply.reward + (0.0 if math.isnan(self.reward) else self.reward)
        for fault in reply.faults:
            self.faults[fault] += 1


@attrs.define(eq=False)
class RunningTurns:
    """Conversations in a rollout, by row key."""

    rollouts: "TurnRollouts"
    examples: Mapping[int, Example]
    conversations: dict[int, Conversation] = attrs.field(factory=dict)

    def restart_rows(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.conversations.pop(key, None)

    def continue_rows(self, keys: Sequence[int], turns: Sequence[Sequence[int]]) -> list[list[int] | None]:
        if len(keys) == 1:
            return [self._continue_row(keys[0], turns[0])]
        with ThreadPoolExecutor(min(len(keys), MAX_THREADS), "turns") as threads:
            return [*threads.map(self._continue_row, keys, turns)]

    def _continue_row(self, key: int, turn: Sequence[int]) -> list[int] | None:
        """Let the environment reply; an exception ends the conversation as a fault. Raises UserError for an example."""
        conversation = self.conversations.setdefault(key, Conversation())
        conversation.turns += 1
        text = self.rollouts.tokenizer.decode([*turn[:-1]])
        try:
            return self._reply(conversation, self.examples[key], text)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            frame = extract_tb(error.__traceback__)[-1]
            location = f"{frame.filename}:{frame.lineno}"
            run_log.warning("an environment raised %s at %s: %s", type(error).__name__, location, error)
            conversation.faults["environment_error"] += 1
            return None

    def _reply(self, conversation: Conversation, example: Example, text: str) -> list[int] | None:
        """Return the ids for the environment's message, or None if the conversation is over."""
        ask = partial(conversation.ask, self.rollouts.environment, example, text)
        waiting, seconds = submit_in_new_thread("turn", ask), self.rollouts.seconds
        if not wait([waiting], seconds).done:
            raise TimeoutError(f"no reply within {seconds:g} s")
        reply = waiting.result()
        conversation.add(reply)
        if reply.is_done:
            return None
        if conversation.turns == self.rollouts.max_turns:
            conversation.faults["max_turns"] += 1
            return None
        return self.rollouts.encode_message(reply, example)

    def list_outcomes(self) -> list[list[float]]:
        """Return a list by row, ordered as the examples: reward, turns, and the faults in FAULTS."""
        rows = map(self.conversations.get, self.examples)
        silent = [math.nan, *[0] * (1 + len(FAULTS))]
        return [[row.reward, row.turns, *row.faults.values()] if row else silent for row in rows]


@component
class TurnRollouts:
    """
    Sampler for conversations with an environment: a turn ends at an end token, and the environment's message follows.

    The sampler's `max_tokens` are for a whole conversation, messages included; a longer conversation is cut after its
    last turn, or inside it. The policy learns from its own tokens only, all with the trajectory's advantage. Faults
    never end a run: they are counted by kind. An environment's error ends its conversation, and a cut conversation
    is truncated, like a completion at the maximum length.
    """

    sampler: Rollouts
    environment: Environment
    tokenizer: Tokenizer
    mesh: Mesh
    prompts: ChatPrompts | None = wired(default=None)
    max_turns: int = setting("turns after which a conversation is cut", default=8, check=between(1, 10_001))
    seconds: float = setting("time limit for an environment's reply", default=600.0, check=above(0))
    _copy: Group = internal(None)

    @property
    def temperature(self) -> float:
        """Divisor of the logits, above 0."""
        return self.sampler.temperature

    def check_before_open(self) -> None:
        """Raise UserError if the chat template leaves out the environment's messages."""
        if self.prompts is not None:
            self.prompts.check_role_after_answer("tool" if self.environment.tool_schemas else "user")

    def check_example(self, example: Example) -> None:
        if self.prompts is None and isinstance(example.get("prompt"), list):
            text = f"the prompt of {example['source']} has messages, and no chat template encodes the environment's"
            raise UserError(f'{text}; write [prompts] with use = "data.template_prompts"', 2)

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def update_weights(self, purpose: str, step: int) -> None:
        self.sampler.update_weights(purpose, step)

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        turns, parts = self._add_turns(prompts)
        return self._add_outcomes(turns, self.sampler.sample(parts, purpose, step))

    def start_sampling(
        self, prompts: Sequence[Prompts], purpose: str, step: int
    ) -> Callable[[], list[Completions]] | None:
        turns, parts = self._add_turns(prompts)
        sampler = self.sampler
        wait = sampler.start_sampling(parts, purpose, step) if isinstance(sampler, SamplesInBackground) else None
        return None if wait is None else lambda: self._add_outcomes(turns, wait())

    def _add_turns(self, prompts: Sequence[Prompts]) -> tuple[RunningTurns, list[Prompts]]:
        """Return new conversations, and the prompts with them."""
        keys = [key for part in prompts for key in part.keys.tolist()]
        examples = [example for part in prompts for example in part.examples]
        turns = RunningTurns(self, dict(zip(keys, examples, strict=True)))
        return turns, [attrs.evolve(part, turns=turns) for part in prompts]

    def _add_outcomes(self, turns: RunningTurns, sampled: Sequence[Completions]) -> list[Completions]:
        """Return completions with the outcomes of their conversations. A collective."""
        outcomes = torch.tensor(run_on_rank0(self._copy, turns.list_outcomes), dtype=torch.float64)
        parts = torch.split(outcomes, [len(completions.tokens) for completions in sampled])
        return [_add_outcomes(completions, part) for completions, part in zip(sampled, parts, strict=True)]

    def encode_message(self, reply: Reply, example: Example) -> list[int]:
        """Encode an environment's message, with a chat template's text around it for prompts of messages."""
        if len(reply.message) > MAX_CHARACTERS:
            raise ValueError(f"the message has {len(reply.message):,} characters, more than {MAX_CHARACTERS:,}")
        content = reply.message.encode("utf-8", "replace").decode()  # half of a surrogate pair has no ids
        if self.prompts is None or not isinstance(example.get("prompt"), list):
            self.check_example(example)
            return [int(number) for number in self.tokenizer.encode(content)]
        try:
            ids = self.prompts.encode_message_after_answer({"role": reply.role, "content": content})
        # A UserError would end the run; `check_before_open` has checked the template, so this ends the conversation.
        except UserError as error:
            raise ValueError(f"{error}") from error
        return [int(number) for number in ids]


def _add_outcomes(completions: Completions, outcomes: Tensor) -> Completions:
    """Return completions with their outcomes, float64 (rows, 2 + kinds of faults); cut ones are not ended."""
    faults, max_turns = outcomes[:, 2:].long(), FAULTS.index("max_turns")
    is_ended = completions.is_ended & (faults[:, max_turns] == 0)
    faults[:, FAULTS.index("max_tokens")] = (~completions.is_ended).long()
    return attrs.evolve(
        completions, rewards=outcomes[:, 0], turns=outcomes[:, 1].long(), faults=faults, is_ended=is_ended
    )
