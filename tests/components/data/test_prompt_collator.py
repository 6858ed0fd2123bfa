"""Prompts for rollouts."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.data.prompt_collator import PromptCollator
from drawloom.graph import UserError
from support.chat import tokenizer_folder


def test_rows_are_prompts_with_their_examples() -> None:
    """A row has the prompt's ids and padding, and the reward's data come along with it."""
    collator = PromptCollator(tokenizer=Bytes())
    examples: list[Any] = [{"prompt": "ab", "answer": "x"}, {"prompt": "abcd", "answer": "y"}]
    batch = collator.collate(examples, 5)
    batch.check()
    assert batch.tokens.tolist() == [[97, 98, 256, 256, 256], [97, 98, 99, 100, 256]]
    assert batch.lengths.tolist() == [2, 4] == [collator.count_tokens(example) for example in examples]
    assert batch.examples == tuple(examples) and batch.weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "a"}, "it has text; write a prompt"),
        ({}, "it has no keys; write a prompt"),
        ({"prompt": ""}, "its prompt is empty"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "the tokenizer has no chat template"),
    ],
)
def test_an_example_without_a_prompt_is_refused(example: dict[str, Any], message: str) -> None:
    """The message says what the example has instead."""
    with pytest.raises(ValueError, match=message):
        PromptCollator(tokenizer=Bytes()).count_tokens(example)


def test_an_unreadable_template_is_named(tmp_path: Path) -> None:
    """A missing file, and one that is not UTF-8, end in a message with the file and a remedy."""
    tokenizer = HuggingFaceTokenizer(path=tokenizer_folder(tmp_path / "tokenizer"))
    tokenizer.open()
    (tmp_path / "latin.jinja").write_bytes(b"na\xefve")
    for name in ("missing.jinja", "latin.jinja"):
        collator = PromptCollator(tokenizer=tokenizer, template=tmp_path / name)
        with pytest.raises(UserError, match=f"template: .*{name} can't be read .*; name a jinja2 file"):
            collator.count_tokens({"prompt": [{"role": "user", "content": "a"}]})


def test_messages_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    """
    The template renders the prompt as for an answer, and a control token in a message is plain text.

    Its completion ends at the template's end of a turn and at the folder's ends; a text's only at the latter.
    """
    folder = tokenizer_folder(tmp_path / "tokenizer")
    tokenizer = HuggingFaceTokenizer(path=folder)
    end = int(tokenizer.encode_with_control_tokens("<|eot|>")[0])
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{end}, {tokenizer.vocab_size}]}}', "utf-8")
    tokenizer = HuggingFaceTokenizer(path=folder)
    tokenizer.open()
    collator = PromptCollator(tokenizer=tokenizer)
    try:
        for content in ("hello", "<|im_end|>"):
            messages = [{"role": "user", "content": content}]
            ids = collator.collate([{"prompt": messages}], 60)
            row = ids.tokens[0, : int(ids.lengths[0])].tolist()
            text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode_with_control_tokens(row) == text
            assert (row == tokenizer.encode_with_control_tokens(text).tolist()) == (content == "hello")
        batch = collator.collate([{"prompt": messages}, {"prompt": "hello"}], 60)
        ends = [{tokenizer.decode_with_control_tokens([end]) for end in ids} for ids in batch.end_ids]
        assert ends == [{"</s>", "<|eot|>", "<|im_end|>"}, {"</s>", "<|eot|>"}]
    finally:
        collator.close()
