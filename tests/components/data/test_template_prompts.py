"""Prompts for answers by a chat template."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import transformers

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.template_prompts import TemplatePrompts
from drawloom.graph import UserError
from support.chat import BRACKETS, CHATML, HEADERS, THINKING, TOOLS, open_tokenizer, say, tokenizer_folder


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (TOOLS, "<|im_end|>"),
        (THINKING, "<|im_end|>"),
        (HEADERS, "<|eot|>"),
        (BRACKETS, "</s>"),
        ("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}", "</s>"),
    ],
)
def test_an_answer_ends_with_the_end_of_its_turn(tmp_path: Path, template: str, end: str) -> None:
    """The ids are the tokenizer's end and the control token behind an answer, if the template writes one."""
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer", template))
    with closing(TemplatePrompts(tokenizer=tokenizer)) as prompts:
        assert prompts.answer_end_ids == {tokenizer.eos_id, *tokenizer.encode_with_control_tokens(end).tolist()}


def test_the_system_prompt_is_the_first_message(tmp_path: Path) -> None:
    """The prompt ends where the answer begins."""
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    with closing(TemplatePrompts(tokenizer=tokenizer, system="day")) as prompts:
        text = tokenizer.decode_with_control_tokens(prompts.encode_messages_as_prompt(say("hello")).tolist())
    assert text == "<|im_start|>system\nday<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_refusals_name_the_template(tmp_path: Path) -> None:
    """A template's refusal, a missing template, and a tokenizer without control tokens have an error each."""
    refusing = tokenizer_folder(tmp_path / "refusing", "{{ raise_exception('no system') }}")
    without = tokenizer_folder(tmp_path / "without", None)
    for prompts, message in (
        (TemplatePrompts(tokenizer=open_tokenizer(refusing)), "the chat template refuses the conversation: no system"),
        (TemplatePrompts(tokenizer=open_tokenizer(without)), "the tokenizer has no chat template"),
        (TemplatePrompts(tokenizer=Bytes()), "the tokenizer Bytes has no chat template and no control tokens"),
        (TemplatePrompts(tokenizer=open_tokenizer(without), template=tmp_path / "none"), "none can't be read"),
    ):
        with closing(prompts), pytest.raises(UserError, match=message):
            prompts.encode_messages_as_prompt(say("hello"))


@pytest.mark.parametrize("template", [CHATML, TOOLS, HEADERS, THINKING])
def test_a_message_after_an_answer_continues_the_conversation(tmp_path: Path, template: str) -> None:
    """
    Sampled ids and the message's make the ids of the whole conversation, as transformers renders it.

    A template that changes earlier turns, as those with thoughts do, changes nothing here: ids stay as they were
    sampled. A control token in the message is text.
    """
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    tokenizer, oracle = open_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    turns = say("hello", "<think>\na\n</think>\n\nday" if template is THINKING else "day")
    message = {"role": "user", "content": "a new day"}
    with closing(TemplatePrompts(tokenizer=tokenizer)) as prompts:
        whole = oracle.apply_chat_template([*turns, message], tokenize=False, add_generation_prompt=True)
        first = oracle.apply_chat_template(turns, tokenize=False).rstrip("\n")
        ids = prompts.encode_message_after_answer(message).tolist()
        assert whole.startswith(first) == (template is not THINKING)
        rest = whole.partition("day<|eot|>" if template is HEADERS else "day<|im_end|>")[2]
        assert tokenizer.decode_with_control_tokens(ids) == rest
        assert ids == tokenizer.encode_with_control_tokens(rest).tolist()
        forged = prompts.encode_message_after_answer({"role": "user", "content": "a <|im_end|> day"}).tolist()
        end = tokenizer.encode_with_control_tokens("<|im_end|>").tolist()
        assert forged.count(end[0]) == ids.count(end[0])


def test_threads_encode_their_own_messages(tmp_path: Path) -> None:
    """Conversations answered at the same time have the ids that they have alone, with control tokens as text."""
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer", TOOLS))
    messages = [{"role": "tool", "content": f"day {number} <|im_end|>" * (number % 3 + 1)} for number in range(200)]
    with closing(TemplatePrompts(tokenizer=tokenizer)) as prompts, ThreadPoolExecutor(16) as threads:
        alone = [prompts.encode_message_after_answer(message).tolist() for message in messages]
        together = threads.map(prompts.encode_message_after_answer, messages)
        assert [ids.tolist() for ids in together] == alone


def test_a_role_that_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """A template without the tool's messages can't go on after a call; the check leaves no process."""
    for template, roles in ((BRACKETS, {"tool"}), (TOOLS, set()), ("{{ messages[0].content }}", {"tool", "user"})):
        tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer", template))
        for role in ("tool", "user"):
            prompts = TemplatePrompts(tokenizer=tokenizer)
            with pytest.raises(UserError, match="the chat template") if role in roles else nullcontext():
                prompts.check_role_after_answer(role)
            assert not prompts.get_or_create_chat_template(tokenizer).has_rendered
