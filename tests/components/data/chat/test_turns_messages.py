"""JSON of all types in messages and tools."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.data.chat.encode import encode_conversation, encode_prompt_messages
from drawloom.components.data.chat.template import ChatTemplate, create_chat_template
from support.chat import CHATML, TOOLS, open_tokenizer, say, tokenizer_folder

PARTS = CHATML.replace("message.content", "message.content | map(attribute='text') | join(' ')")
BOTH = CHATML.replace(
    "message.content",
    "(message.content if message.content is string else message.content | map(attribute='text') | join)",
)
FIELDS = TOOLS.replace(
    "(message.content or '')", "(message.content or '') + (message.reasoning_content or '') ~ message.name"
)
CALL: dict[str, Any] = {"type": "function", "function": {"name": "find", "arguments": {"q": [1, None, "é"]}}}
RAW = TOOLS.replace("call.function | tojson", "call.function.name + call.function.arguments")
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"é": 1.5}}}


class Folder:
    """A tokenizer with a template, here and in transformers."""

    def __init__(self, path: Path, template: str) -> None:
        from transformers import AutoTokenizer  # takes seconds

        self.tokenizer = open_tokenizer(tokenizer_folder(path, template))
        self.theirs = AutoTokenizer.from_pretrained(path)
        self.template = create_chat_template(self.tokenizer, None)

    def encode(self, messages: Any, tools: Any = None) -> str:
        """Return the conversation's text, with trained answers."""
        weights = [float(message["role"] == "assistant") for message in messages]
        row = encode_conversation(self.tokenizer, self.template, messages, weights, tools)
        return self.tokenizer.decode_with_control_tokens(row.ids.tolist())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Folder]]:
    """Yield the folders by template."""
    path = tmp_path_factory.mktemp("folders")
    texts = {"chatml": CHATML, "tools": TOOLS, "parts": PARTS, "both": BOTH, "fields": FIELDS, "raw": RAW}
    folders = {name: Folder(path / name, text) for name, text in texts.items()}
    yield folders
    for folder in folders.values():
        folder.template.close()


def text_parts(*texts: str) -> list[dict[str, str]]:
    """Return content in parts."""
    return [{"type": "text", "text": text} for text in texts]


def answer(**fields: Any) -> list[dict[str, Any]]:
    """Return a conversation with an answer's fields."""
    return [{"role": "user", "content": "hi"}, {"role": "assistant", **fields}]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("chatml", answer(content="good day")),
        ("both", answer(content=text_parts("good ", "day"))),
        ("parts", [{**message, "content": text_parts(message["content"], "there")} for message in say("hi", "day")]),
        ("tools", answer(content=None, tool_calls=[CALL])),
        ("tools", answer(tool_calls=[CALL, CALL])),
        ("raw", answer(tool_calls=[{"name": "find", "function": {**CALL["function"], "arguments": '{"q": 1}'}}])),
        ("tools", answer(content="good", tool_calls=None, unknown={"a": [1]})),
        ("fields", answer(content="good", name="there", thinking="hello")),
        ("fields", answer(content="good", name=None, reasoning="hello", reasoning_content=None)),
    ],
)
@pytest.mark.parametrize("tools", [None, [TOOL], json.dumps([TOOL])], ids=["none", "list", "text"])
def test_messages_are_rendered_as_by_transformers(
    folders: dict[str, Folder], name: str, messages: Any, tools: Any
) -> None:
    """Strings, parts read by the template, nulls, tool calls, other fields and tools give the same text."""
    tools = tools if "tools" in folders[name].tokenizer.chat_templates["default"] else None
    theirs = json.loads(tools) if isinstance(tools, str) else tools
    wanted = folders[name].theirs.apply_chat_template(messages, tools=theirs, tokenize=False)
    assert folders[name].encode(messages, tools) == wanted


@pytest.mark.parametrize("name", ["chatml", "parts"])
def test_contents_are_given_in_the_form_that_the_template_reads(folders: dict[str, Folder], name: str) -> None:
    """Parts are joined for a template of strings, and strings are parts for a template of parts: no text is lost."""
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ngood day<|im_end|>\n"
    assert folders[name].encode(say("hi", "good day")) == wanted
    assert folders[name].encode([{**m, "content": text_parts(m["content"])} for m in say("hi", "good day")]) == wanted
    ids = encode_prompt_messages(folders[name].tokenizer, folders[name].template, say("hi"))
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert folders[name].tokenizer.decode_with_control_tokens(ids.tolist()) == prompt


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (answer(content=None), "turn 2: it has neither content nor tool_calls"),
        (answer(tool_calls=[]), "turn 2: it has neither content nor tool_calls"),
        ([{"role": "user", "content": None}, *answer(content="a")], "turn 1: it has neither"),
        (answer(content=3), "turn 2: its content is 3, not text"),
        (answer(content=True), "turn 2: its content is True, not text"),
        (answer(content={"text": "a"}), "turn 2: its content is {'text': 'a'}, not text"),
        (answer(content=["a"]), "turn 2: part 1 of its content is 'a', and only text can be read"),
        (answer(content=[*text_parts("a"), {"type": "image"}]), "turn 2: part 2 of its content is 'image'"),
        (answer(content=[{"type": "text", "text": None}]), "turn 2: part 1 of its content is 'text'"),
        (answer(content="a", tool_calls="find()"), "turn 2: its tool_calls are not a list of named calls"),
        (answer(content="a", tool_calls=[{"function": "find"}]), "turn 2: its tool_calls are not a list"),
        ([{"role": None, "content": "a"}], "turn 1 is not an object with a role"),
        (answer(content="good", tool_calls=[CALL]), "turn 2: the template leaves its call of find out"),
    ],
)
def test_other_messages_are_refused(folders: dict[str, Folder], messages: Any, reason: str) -> None:
    """The reason has the turn and the value, for answers and in prompts."""
    with pytest.raises(ValueError, match=reason.replace("{", r"\{")):
        encode_conversation(
            folders["chatml"].tokenizer, folders["chatml"].template, messages, [0.0] * (len(messages) - 1) + [1.0]
        )


TEXT_CALL = {"function": {"name": "find", "arguments": '{"q": 1}'}}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "reason"),
    [
        (CHATML, answer(content="a", reasoning="hello"), None, "turn 2: the template leaves its reasoning out"),
        (
            TOOLS,
            answer(tool_calls=[TEXT_CALL]),
            None,
            "turn 2: the template leaves the arguments of find as a text out",
        ),
        (
            TOOLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
            answer(tool_calls=[CALL, CALL]),
            None,
            "turn 2: the template leaves its call of find out",
        ),
        (CHATML, say("hi", "good"), [TOOL], "the template leaves the tool find out"),
    ],
)
def test_parts_that_the_template_leaves_out_are_refused(
    tmp_path: Path, template: str, messages: Any, tools: Any, reason: str
) -> None:
    """Thoughts, arguments quoted as a text, the second of two calls and a tool are not lost without a word."""
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer", template))
    with closing(ChatTemplate({"default": template})) as renderer, pytest.raises(ValueError, match=reason):
        encode_conversation(tokenizer, renderer, messages, [0.0, 1.0], tools)


@pytest.mark.parametrize("tools", ["find", '{"type": "function"}', {"type": "function"}, [["find"]], "[1]", 3])
def test_tools_that_are_not_a_list_of_objects_are_refused(folders: dict[str, Folder], tools: Any) -> None:
    """A template would iterate over characters or keys."""
    with pytest.raises(ValueError, match="its tools are"):
        folders["tools"].encode(say("hi", "good"), tools)


@pytest.mark.parametrize("change", ["''", "message.content | upper", "message.content.split('</think>')[-1]"])
def test_an_answer_that_is_not_in_the_text_is_refused(tmp_path: Path, change: str) -> None:
    """Otherwise only its end token would be trained, or another text."""
    text = CHATML.replace("message.content", f"(message.content if message.role == 'user' else {change})")
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer", text))
    with (
        closing(ChatTemplate({"default": text})) as template,
        pytest.raises(ValueError, match="turn 2: the template leaves its content out, or changes it"),
    ):
        encode_conversation(tokenizer, template, say("hi", "<think>so</think>good"), [0.0, 1.0])
