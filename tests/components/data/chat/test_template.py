"""Chat templates beside transformers, and hostile ones."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.data.auto_tokenizer import read_special_tokens
from drawloom.components.data.chat.template import ChatTemplate, RenderError, create_chat_template, read_chat_templates
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.run.folder_records import copy_files
from drawloom.graph import UserError
from support.chat import BRACKETS, CHATML, HEADERS, THINKING, TOOLS, say, tokenizer_folder

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@contextmanager
def process(text: str, **settings: Any) -> Iterator[ChatTemplate]:
    """Yield a template in its process."""
    template = ChatTemplate({"default": text}, TOKENS, **settings)
    template.open()
    try:
        yield template
    finally:
        template.close()


@pytest.mark.parametrize("text", [CHATML, TOOLS, THINKING, HEADERS, BRACKETS])
def test_renderings_equal_those_of_transformers(text: str) -> None:
    """Renderings agree with and without a generation prompt, tools, and text that HTML would escape."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    messages = say("a <b> & 'c' ä\n", "<think>\nwhy\n</think>\n\n d ", "e", "f")
    tools = [{"name": "find", "parameters": {"q": "é<"}}]
    with process(text) as template:
        for prompt in (False, True):
            request = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
            render: Any = render_jinja_template
            [wanted], _ = render([messages], tools, chat_template=text, add_generation_prompt=prompt, **TOKENS)
            assert template.render([request]) == [wanted]


def test_marks_of_generation_and_the_date_are_understood() -> None:
    """
    `{% generation %}` renders its contents; the day comes from the recipe, and is required if the template uses it.
    """
    text = "{% generation %}a{% endgeneration %}{{ strftime_now('%d %b %Y') }}"
    with process(text, date="2024-07-26") as template:
        assert template.render([{"messages": []}]) == ["a26 Jul 2024"]
    with process(text) as template, pytest.raises(RenderError, match="today's date; write date ="):
        template.render([{"messages": []}])


HOSTILE = {
    "Python's classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes by a filter": "{{ ''|attr('__class__') }}",
    "format strings": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "files": "{% include '/etc/passwd' %}",
    "names of a namespace": "{% set n = namespace(x=1) %}{% set n.__class__ = 1 %}{{ n.x }}",
    "memory": "{{ 'x' * 3000000000 }}",
    "long texts": "{{ 'x' * 30000000 }}",
    "its own reason": "{{ raise_exception('roles must alternate') }}",
}


def test_hostile_templates_reach_nothing_and_the_next_conversation_is_rendered() -> None:
    """A hostile template gives an error or a harmless text, in bounded memory, and the process lives on."""
    for what, text in HOSTILE.items():
        with process("{% if messages %}ok{% else %}" + text + "{% endif %}") as template:
            try:
                [rendered] = template.render([{"messages": []}])
                assert "class" not in rendered and "root:" not in rendered, what
            except RenderError as error:
                assert len(str(error)) < 600, what
            assert template.render([{"messages": [{}]}]) == ["ok"], what


def test_an_endless_template_is_ended() -> None:
    """After the deadline there is one message, and no process is left."""
    text = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with process(text, seconds=0.5) as template:
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"takes more than 0.5 s"):
            template.render([{"messages": []}])
        assert time.monotonic() - begin < 20 and not template.has_rendered


def test_an_invalid_template_is_refused() -> None:
    """The error quotes jinja2's reason."""
    with pytest.raises(UserError, match=r"can't be read: .*endfor"), process("{% for a in b %}"):
        pass


def test_the_template_of_a_folder_is_in_a_file_or_in_the_configuration(tmp_path: Path) -> None:
    """Files come first; tokens are text or objects."""
    assert read_chat_templates(tmp_path) == read_special_tokens(tmp_path) == {}
    folder = tokenizer_folder(tmp_path / "a")
    assert (read_chat_templates(folder), read_special_tokens(folder)) == ({"default": CHATML}, TOKENS)
    (folder / "chat_template.jinja").unlink()
    config = '{"chat_template": "x", "bos_token": {"content": "<s>"}}'
    (folder / "tokenizer_config.json").write_text(config)
    assert (read_chat_templates(folder), read_special_tokens(folder)) == ({"default": "x"}, {"bos_token": "<s>"})


@pytest.mark.parametrize("in_files", [False, True])
def test_named_templates_are_chosen_as_by_transformers(tmp_path: Path, in_files: bool) -> None:
    """
    `tool_use` renders lines with tools, `default` all others, from the configuration or from files; both are saved.
    """
    from transformers import AutoTokenizer  # takes seconds

    folder, tool_use = tokenizer_folder(tmp_path / "a"), "{{ tools | tojson }} " + CHATML
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(tool_use)
    else:
        (folder / "chat_template.jinja").unlink()
        templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tool_use}]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    (tmp_path / "saved").mkdir()
    tokenizer = HuggingFaceTokenizer(path=folder)
    tokenizer.save(tmp_path / "saved")
    copy_files(tmp_path / "copies", tokenizer.list_input_files()["path"])
    for path in (folder, tmp_path / "saved", tmp_path / "copies"):
        theirs = AutoTokenizer.from_pretrained(path)
        with closing(create_chat_template(HuggingFaceTokenizer(path=path), None)) as template:
            for tools in (None, [], [{"type": "function", "function": {"name": "find"}}]):
                wanted = theirs.apply_chat_template(say("a", "b"), tools=tools, tokenize=False)
                assert template.render([{"messages": say("a", "b"), "tools": tools}]) == [wanted]
