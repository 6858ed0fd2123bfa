"""Contracts for the ports of reinforcement learning: samplers of completions, rewards, environments and tools."""

import json
import math

import torch

from drawloom.graph.testing import expect
from drawloom.ports import FAULTS, Answer, Completions, Environment, Prompts, Reply, Reward, Rollouts, Tool

TEXTS = ("", "12", "<tool_call>", "[", "a b")


def replies_depend_on_their_conversation_alone(environment: Environment) -> None:
    """A conversation has the same replies beside another one, and when it is held again."""
    example = {"prompt": "1+1=", "answer": "12"}
    alone = [environment.reset(example).step(text) for text in TEXTS]
    for text, reply in zip(TEXTS, alone, strict=True):
        episode, other = environment.reset(example), environment.reset(example)
        other.step("something else")
        expect(episode.step(text) == reply, f"another conversation changes the reply to {text!r}")


def replies_have_messages_rewards_and_faults(environment: Environment) -> None:
    """A reply is a text, its reward is finite or None, and its faults have known kinds."""
    for text in TEXTS:
        reply: Reply = environment.reset({"prompt": "1+1=", "answer": "12"}).step(text)
        expect(isinstance(reply.message, str), f"the message to {text!r} is {reply.message!r}")
        expect(reply.reward is None or math.isfinite(reply.reward), f"the reward is {reply.reward!r}")
        expect({*reply.faults} <= {*FAULTS}, f"the faults are {reply.faults!r}")
    json.dumps([dict(schema) for schema in environment.tool_schemas])


def tool_schemas_name_the_function(tool: Tool) -> None:
    """The schema is JSON with the function's name and an object's parameters."""
    described = json.loads(json.dumps(tool.tool_schema))["function"]
    expect(described["name"] == tool.function.__name__, f"the schema's name is {described['name']!r}")
    expect(described["parameters"]["type"] == "object", "the parameters are not an object's")


STEP = 3


def _select_example_prompts(*rows: int) -> Prompts:
    """Return some of four prompts, of one to three tokens."""
    tokens = torch.tensor([[1, 2, 3], [3, 0, 0], [2, 1, 0], [1, 2, 3]])
    indices = torch.tensor(rows)
    examples = ({"answer": "12"},) * len(rows)
    return Prompts(tokens[indices], torch.tensor([3, 1, 2, 3])[indices], indices + 7, examples=examples)


def completions_follow_their_prompts(rollouts: Rollouts) -> None:
    """A row begins with its prompt, and has at least one sampled token behind it."""
    prompts = _select_example_prompts(0, 1, 2, 3)
    (completions,) = rollouts.sample([prompts], "train", STEP)
    expect(completions.starts.equal(prompts.lengths), "a completion does not begin where its prompt ends")
    expect(bool((completions.sampled_counts > 0).all()), "a completion has no token")
    for tokens, prompt, length in zip(completions.tokens, prompts.tokens, prompts.lengths.tolist(), strict=True):
        expect(tokens[:length].equal(prompt[:length]), f"the prompt {prompt[:length].tolist()} is changed")


def log_probabilities_belong_to_sampled_tokens(rollouts: Rollouts) -> None:
    """Log-probabilities are finite and at most 0, and exactly 0 where the next token was not sampled."""
    (completions,) = rollouts.sample([_select_example_prompts(0, 1, 2, 3)], "train", STEP)
    logps, is_target = completions.logps, completions.is_target
    expect(logps.shape == completions.tokens.shape, f"log-probabilities have the shape {tuple(logps.shape)}")
    expect(bool((logps <= 0).all()) and bool(logps.isfinite().all()), "a log-probability is above 0 or not finite")
    expect(not bool(logps[~is_target].any()), "a token that was not sampled has a log-probability")


def a_completion_depends_only_on_its_key(rollouts: Rollouts) -> None:
    """A row is the same in another microbatch, beside other rows, and when it is sampled again."""
    (together,) = rollouts.sample([_select_example_prompts(0, 1, 2, 3)], "train", STEP)
    for row, part in zip(
        (2, 0), rollouts.sample([_select_example_prompts(2), _select_example_prompts(0)], "train", STEP), strict=True
    ):
        expect(_rows_are_equal(part, 0, together, row), f"row {row} is another one in a microbatch of its own")


def _rows_are_equal(one: Completions, row: int, other: Completions, index: int) -> bool:
    ends = int(one.ends[row]), int(other.ends[index])
    return ends[0] == ends[1] and one.tokens[row, : ends[0]].equal(other.tokens[index, : ends[0]])


def scores_are_finite_and_repeatable(reward: Reward) -> None:
    """
    Every answer has a finite score or None, and the same one when it is scored again, alone.

    The example has an `answer`, the text 12.
    """
    answers = [Answer(text, 2, bool(text), {"answer": "12"}) for text in ("12", "no", "", "12\n", "x" * 1000)]
    scores = reward.scores(answers)
    expect(len(scores) == len(answers), f"{len(answers)} answers have {len(scores)} scores")
    for score, answer in zip(scores, answers, strict=True):
        expect(score is None or math.isfinite(score), f"the score is {score!r}")
        expect([*reward.scores([answer])] == [score], "an answer has another score when it is scored alone")
    expect([*reward.scores([])] == [], "no answers have scores")


def reward_weight_is_finite(reward: Reward) -> None:
    """The weight in the sum of rewards is a finite number."""
    expect(math.isfinite(reward.weight), f"the weight is {reward.weight}")
