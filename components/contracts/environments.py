"""Contracts for environments of conversations, and for tools."""

import json
import math

from drawloom.graph.testing import expect
from drawloom.ports import FAULTS, Environment, Reply, Tool

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
    """A reply is a text, its reward is finite or None, and its faults are kinds that are counted."""
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
