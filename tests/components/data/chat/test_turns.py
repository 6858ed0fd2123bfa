"""A turn's part in a rendering."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import EarlierTurnError, Rendered, render_and_locate_turns
from support.chat import BRACKETS, CHATML, HEADERS, THINKING, TOOLS, say


@contextmanager
def process(text: str) -> Iterator[ChatTemplate]:
    """Yield a template in its process."""
    template = ChatTemplate({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"})
    template.open()
    try:
        yield template
    finally:
        template.close()


def render_chat(
    text: str, messages: Sequence[Any], weights: Sequence[float] | None = None, tools: Any = None
) -> Rendered:
    """Render a conversation; train the assistant's turns, or the turns with a weight."""
    given = [float(message["role"] == "assistant") for message in messages] if weights is None else weights
    with process(text) as template:
        return render_and_locate_turns(template, messages, given, tools)


def trained_texts(rendering: Rendered) -> list[str]:
    """Return the texts with a training weight."""
    return [rendering.text[span.first : span.last] for span in rendering.trained]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CHATML, ["one<|im_end|>", " two \n<|im_end|>"]),
        (HEADERS, ["one<|eot|>", "two<|eot|>"]),
        (BRACKETS, [" one</s>", " two</s>"]),
    ],
    ids=["chatml", "headers", "brackets"],
)
def test_a_turn_is_its_answer_and_its_end(text: str, wanted: list[str]) -> None:
    """Neither the generation prompt before the turn nor the text after the end token is trained: off by none."""
    rendering = render_chat(text, say("hi", "one", "and?", " two \n"))
    assert trained_texts(rendering) == wanted
    begins = [rendering.text[: span.first] for span in rendering.trained]
    assert begins[0].endswith(("assistant\n", "<|end|>\n\n", "[/INST]"))


def test_a_repeated_text_is_not_mistaken_for_the_turn() -> None:
    """An answer that repeats the question, and an empty one, have their own positions."""
    assert trained_texts(render_chat(CHATML, say("same", "same", "same", ""))) == ["same<|im_end|>", "<|im_end|>"]


def test_a_template_that_changes_earlier_turns_is_refused_and_the_last_turn_is_not() -> None:
    """Thinking stripped from earlier turns makes their text ambiguous; in the last turn it is trained."""
    messages = say("a", "<think>\nwhy\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo")
    with pytest.raises(EarlierTurnError, match="turn 2: the template renders it differently when other turns follow"):
        render_chat(THINKING, messages)
    assert trained_texts(render_chat(THINKING, messages, [0, 0, 0, 1])) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert trained_texts(render_chat(THINKING, messages[:2])) == ["<think>\nwhy\n</think>\n\none<|im_end|>"]


def test_a_template_that_drops_the_system_turn_from_the_prompt_is_refused() -> None:
    """With an answer behind it the template drops the system's text, so training would differ from generation."""
    with pytest.raises(ValueError, match="turn 3: a model answers after 'be brief"):
        render_chat(BRACKETS, say("a", "one", system="be brief"))


def test_tool_calls_and_tools_are_in_their_turns() -> None:
    """A call without content is a turn; the tool's answer is not trained."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}
    messages = [*say("where?"), call, {"role": "tool", "content": "here"}, {"role": "assistant", "content": "here."}]
    rendering = render_chat(TOOLS, messages, tools=[{"name": "find"}])
    assert trained_texts(rendering) == [
        '<tool_call>{"name": "find", "arguments": {}}</tool_call><|im_end|>',
        "here.<|im_end|>",
    ]


def test_any_role_can_be_trained_with_a_weight() -> None:
    """A user's turn is trained from the template's opening on, and each turn with its weight."""
    rendering = render_chat(CHATML, say("a", "b", "c", "d"), [0, 0.5, 1, 0])
    assert trained_texts(rendering) == ["b<|im_end|>", "<|im_start|>user\nc<|im_end|>"]
    assert [span.weight for span in rendering.trained] == [0.5, 1.0]


def test_contents_are_found_in_the_rendering() -> None:
    """Contents are found whole or trimmed; a content changed in another way is not found."""
    rendering = render_chat(HEADERS, say(" a ", "b"), [0, 1])
    assert {number: rendering.text[slice(*span)] for number, span in rendering.contents.items()} == {0: "a", 1: "b"}
    assert set(render_chat(CHATML.replace("message.content", "message.content | upper"), say("a")).contents) == set()
