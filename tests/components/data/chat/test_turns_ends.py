"""End tokens in answers."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from drawloom.components.data.chat.encode import encode_conversation
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import EarlierTurnError, find_turn_end_ids
from support.chat import CHATML, HEADERS, ROLES, TOOLS, UNENDED, open_tokenizer, say, tokenizer_folder

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "find"}}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer with control tokens."""
    return open_tokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    """Yield the parameter's template."""
    with closing(ChatTemplate({"default": request.param})) as template:
        yield template


def trained_texts(tokenizer: Any, template: ChatTemplate, messages: Sequence[Any]) -> list[str]:
    """Return the trained texts of an encoded conversation, in order."""
    row = encode_conversation(tokenizer, template, messages, [float(m["role"] == "assistant") for m in messages])
    texts, is_new = [""], False
    for token, weight in zip(row.ids.tolist(), row.weights.tolist(), strict=True):
        if weight and is_new:
            texts.append("")
        texts[-1] += tokenizer.decode_with_control_tokens([token]) if weight else ""
        is_new = not weight
    return texts[1:]


def mask_like_trl(messages: Sequence[Any]) -> list[str]:
    """Return the texts marked by transformers, for a template repaired like TRL's glm4moe_training.jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    following = "messages[loop.index0 + 1].role if not loop.last else 'tool' if message.tool_calls else 'user'"
    repaired = ROLES.replace("END", "{{- '<|' + (" + following + ") + '|>' }}").replace(
        "{%- else %}{{- '<|' + message.role + '|>",
        "{%- else %}{{- ('<|' + message.role + '|>' if loop.first else '') + '",
    )
    render: Any = render_jinja_template
    [text], [spans] = render([messages], chat_template=repaired, return_assistant_tokens_mask=True)
    return [text[first:last] for first, last in spans]


@pytest.mark.parametrize("template", [UNENDED], indirect=True)
@pytest.mark.parametrize(
    "messages",
    [
        say("hi", "one", "and", "two"),
        say("hi", "one", system="be brief"),
        [*say("hi"), CALL, {"role": "tool", "content": "found"}, {"role": "assistant", "content": "good"}],
        [*say("hi"), CALL],
        say("hi", "one", "and", "", "so", ""),
    ],
    ids=["two answers", "system", "tool", "last call", "empty"],
)
def test_answers_are_trained_up_to_the_token_that_trl_trains(
    tokenizer: Any, template: ChatTemplate, messages: Any
) -> None:
    """Without an end token of its own, an answer ends with the next turn's token, and the last with the one to come."""
    assert trained_texts(tokenizer, template, messages) == mask_like_trl(messages)


@pytest.mark.parametrize("template", [PLAIN], indirect=True)
def test_the_end_of_text_ends_only_the_last_answer(tokenizer: Any, template: ChatTemplate) -> None:
    """A template without control tokens is refused for an earlier answer: nothing would end it."""
    assert trained_texts(tokenizer, template, say("hi", "one")) == ["assistant: one</s>"]
    with pytest.raises(EarlierTurnError, match="turn 2: no control token ends it"):
        trained_texts(tokenizer, template, say("hi", "one", "and", "two"))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, {"<|im_end|>"}),
        (HEADERS, {"<|eot|>"}),
        (
            TOOLS.replace("{{- '<|im_end|>", "{{- ('<|eot|>' if message.tool_calls else '<|im_end|>') + '"),
            {"<|im_end|>", "<|eot|>"},
        ),
        (UNENDED, {"<|user|>", "<|tool|>"}),
        (PLAIN, set()),
    ],
    indirect=["template"],
)
def test_answers_and_tool_calls_end_with_the_trained_tokens(
    tokenizer: Any, template: ChatTemplate, ends: set[str]
) -> None:
    """Generation stops at the last trained ids."""
    ids = find_turn_end_ids(tokenizer, template)
    assert {tokenizer.decode_with_control_tokens([token]) for token in ids} == ends
