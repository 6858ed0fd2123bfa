"""continue a prompt, or chat, with weights from a run or a model folder"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import date
from itertools import chain
from pathlib import Path

import attrs

from drawloom import Container, at_least
from drawloom.components.commands._trained import CheckpointCommand, find_chat_template, parse_run_or_mirror
from drawloom.components.data.template_prompts import TemplatePrompts
from drawloom.components.distributed.rng import create_generator
from drawloom.components.sampling.generate import Sampler, stream_decoded_text
from drawloom.graph.cli.command import (
    Count,
    Project,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.ports import Executor, LanguageModel, Mesh, Tokenizer, complete_prompt, find_end_ids

TEXT_TOKENS, TEXT_CONTEXT = 200, 256
CHAT_TOKENS, CHAT_CONTEXT = 1024, 4096


@output_class
class GenerateResult(Result):
    """Sampled text, printed as it comes."""

    step: int | None = output("the checkpoint's step; null for a model folder without one")
    prompt: str = output("prompt")
    continuation: str = output("sampled text after the prompt")


@output_class
class ChatMessage:
    """A message in a conversation."""

    role: str = output("system, user or assistant")
    content: str = output("text")


@output_class
class ChatResult(Result):
    """Conversation; its answers are printed as they come."""

    step: int | None = output("the checkpoint's step; null for a model folder without one")
    messages: Sequence[ChatMessage] = output("all messages, in order")


@command
class GenerateCommand(CheckpointCommand):
    """A sampled continuation of a prompt, or a conversation."""

    run_folder: Path | str = argument(
        "such as runs/first_run, the URL of its mirror, or a model folder such as an export",
        parse=parse_run_or_mirror,
    )
    prompt: str | None = option("text to continue, or with --chat the only message to answer", metavar="TEXT")
    chat: bool = option("answer messages by the chat template: --prompt, or each line of stdin")
    system: str | None = option("the system prompt", metavar="TEXT", needs="chat")
    template: Path | None = option("a template (default: the run's, or the folder's)", metavar="FILE", needs="chat")
    tokens: Count | None = option(
        f"most tokens to sample (default: {TEXT_TOKENS}; with --chat, {CHAT_TOKENS} for an answer)"
    )
    context: Count | None = option(
        f"most tokens the model sees (default: {TEXT_CONTEXT}; with --chat the model's, up to {CHAT_CONTEXT})"
    )
    temperature: float = option("sampling temperature; 0 is greedy", default=0.8, metavar="T", check=at_least(0))
    top_k: Count | None = option("sample only from the K most likely tokens (default: all)", metavar="K")
    seed: int = option("seed for sampling", default=0)

    def run(self, project: Project) -> GenerateResult | ChatResult:
        if not self.chat and self.prompt is None:
            raise UserError(
                "--prompt: there is no text to continue; add --prompt TEXT, or --chat to answer messages", 2
            )
        with self.open_run_or_model_folder(project, Executor, Tokenizer, Mesh, LanguageModel) as (nodes, step):
            if self.chat:
                return ChatResult(step, self._run_chat(nodes))
            prompt = self.prompt or ""
            return GenerateResult(step, prompt, self._sample_and_print_continuation(nodes, prompt))

    def _sample_and_print_continuation(self, nodes: Container, text: str) -> str:
        """Print the prompt and its continuation as it comes; return the continuation."""
        tokenizer = nodes.get(Tokenizer)
        sampler = self._make_sampler(nodes, context=self.context or TEXT_CONTEXT, ends=find_end_ids(tokenizer))
        prompt = complete_prompt(tokenizer, tokenizer.encode(text)).tolist()
        pieces = stream_decoded_text(tokenizer, sampler.sample_continuation(prompt, self.tokens or TEXT_TOKENS))
        first = next(pieces, "")  # an error is raised before anything is printed
        print_escaped_text(text, end="")
        return _print_pieces(chain([first], pieces))

    def _run_chat(self, nodes: Container) -> list[ChatMessage]:
        """Answer the user's messages, and return the conversation."""
        tokenizer = nodes.get(Tokenizer)
        template = self.template or find_chat_template(nodes)
        prompts = TemplatePrompts(tokenizer=tokenizer, template=template, date=date.today(), system=self.system)
        with closing(prompts):
            context = self._choose_chat_context_length(nodes)
            sampler = self._make_sampler(nodes, context=context, ends=prompts.answer_end_ids)
            messages: list[ChatMessage] = []
            for text in _read_messages(self.prompt):
                messages.append(ChatMessage("user", text))
                prompt = prompts.encode_messages_as_prompt(
                    [{"role": message.role, "content": message.content} for message in messages]
                ).tolist()
                messages.append(ChatMessage("assistant", _print_answer(tokenizer, sampler, prompt, self.tokens)))
        return messages if self.system is None else [ChatMessage("system", self.system), *messages]

    def _choose_chat_context_length(self, nodes: Container) -> int:
        """Return the longest conversation in tokens. Raises UserError if --context exceeds the model's positions."""
        longest = nodes.get(LanguageModel).max_sequence_length
        if self.context and longest and self.context > longest:
            raise UserError(f"--context: {self.context} is more than the model's {longest} positions; write fewer", 2)
        return self.context or min(longest or CHAT_CONTEXT, CHAT_CONTEXT)

    def _make_sampler(self, nodes: Container, *, context: int, ends: frozenset[int]) -> Sampler:
        """Return a sampler with the options' distribution and seed."""
        return Sampler(
            model=nodes.get(Executor),
            pipeline=nodes.get(Mesh).pipeline_group,
            generator=create_generator(self.seed, "sample"),
            ends=ends,
            context=context,
            temperature=self.temperature,
            top_k=self.top_k,
        )


def _print_answer(tokenizer: Tokenizer, sampler: Sampler, prompt: Sequence[int], tokens: int | None) -> str:
    """Print an answer as it comes, and return it. Raises UserError if the conversation is longer than the context."""
    tokens = min(tokens or CHAT_TOKENS, sampler.context - len(prompt))
    if tokens < 1:
        text = f"the conversation has {len(prompt)} tokens, and the model sees {sampler.context}"
        raise UserError(f"{text}; start another one, or write a larger --context")
    # The cache has room for this answer alone, since a model's longest context may not fit into memory.
    sampler = attrs.evolve(sampler, context=len(prompt) + tokens)
    ids: list[int] = []

    def iterate_and_collect_sampled_ids() -> Iterator[int]:
        for token in sampler.sample_continuation(prompt, tokens):
            ids.append(token)
            yield token

    answer = _print_pieces(stream_decoded_text(tokenizer, iterate_and_collect_sampled_ids()))
    if len(ids) == tokens:
        print_escaped_text(f"(the answer is cut after {tokens} tokens)", "stderr")
    return answer


def _read_messages(prompt: str | None) -> Iterator[str]:
    """Yield the prompt, or standard input's lines without empty ones, with a prompt sign on a terminal."""
    if prompt is not None:
        yield prompt
        return
    while True:
        if sys.stdin.isatty():
            print_escaped_text("> ", "stderr", end="")
        if not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text


def _print_pieces(pieces: Iterable[str]) -> str:
    """Print a text's pieces as they come, and a line end; return the text."""
    text = ""
    for piece in pieces:
        print_escaped_text(piece, end="")
        text += piece
    print_escaped_text("")
    return text
