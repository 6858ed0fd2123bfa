"""continue a prompt, or chat, with weights from a run or a model folder"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import date
from itertools import chain
from pathlib import Path

import attrs

from drawloom.components.commands._options import make_integer_parser, parse_temperature
from drawloom.components.commands._trained import add_run_and_checkpoint_arguments, open_trained_run_or_model_folder
from drawloom.components.data.template_prompts import TemplatePrompts
from drawloom.components.distributed.rng import create_generator
from drawloom.components.ports.corpus import Tokenizer, complete_prompt, find_end_ids
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.pipeline import Predictor
from drawloom.components.sampling.generate import Sampler, stream_decoded_text
from drawloom.graph import UserError
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.project import Project
from drawloom.graph.runtime.container import Container

TEXT_TOKENS, TEXT_CONTEXT = 200, 256
CHAT_TOKENS, CHAT_CONTEXT = 1024, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    add_run_and_checkpoint_arguments(
        parser, "such as runs/first_run, the URL of its mirror, or a model folder such as an export"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue, or with --chat the only message to answer")
    parser.add_argument(
        "--chat", action="store_true", help="answer messages by the chat template: --prompt, or each line of stdin"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system prompt")
    parser.add_argument("--template", type=Path, metavar="FILE", help="with --chat: a template (default: the folder's)")
    help = f"most tokens to sample (default: {TEXT_TOKENS}; with --chat, {CHAT_TOKENS} for an answer)"
    parser.add_argument("--tokens", type=make_integer_parser(), metavar="N", help=help)
    help = f"most tokens the model sees (default: {TEXT_CONTEXT}; with --chat the model's, up to {CHAT_CONTEXT})"
    parser.add_argument("--context", type=make_integer_parser(), metavar="N", help=help)
    parser.add_argument(
        "--temperature",
        type=parse_temperature,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=make_integer_parser(),
        metavar="K",
        help="sample only from the K most likely tokens (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for sampling (default: 0)")


@output_class
class GenerateResult(Result):
    """Sampled text, printed as it comes."""

    step: int | None = output("the checkpoint's step; null for a model folder without one")
    prompt: str = output("prompt")
    continuation: str = output("sampled text after the prompt")

    def render(self, format: str) -> str:
        """Return nothing: the text is printed already."""
        return ""


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

    def render(self, format: str) -> str:
        """Return nothing: the answers are printed already."""
        return ""


def main(options: argparse.Namespace, project: Project) -> GenerateResult | ChatResult:
    """Sample a continuation of the prompt, or answers to messages."""
    if not options.chat and options.prompt is None:
        raise UserError("--prompt: there is no text to continue; add --prompt TEXT, or --chat to answer messages", 2)
    if not options.chat and (options.system is not None or options.template is not None):
        raise UserError("--system and --template are for conversations; add --chat", 2)
    with open_trained_run_or_model_folder(project, options, Predictor, Tokenizer, Mesh, LanguageModel) as (run, step):
        if options.chat:
            return ChatResult(step, _run_chat(run, options))
        return GenerateResult(step, options.prompt, _print_continuation(run, options))


def _print_continuation(run: Container, options: argparse.Namespace) -> str:
    """Print the prompt and its continuation as it comes; return the continuation."""
    tokenizer, context = run.get(Tokenizer), options.context or TEXT_CONTEXT
    sampler = _make_sampler(run, options, context=context, ends=find_end_ids(tokenizer))
    prompt = complete_prompt(tokenizer, tokenizer.encode(options.prompt)).tolist()
    pieces = stream_decoded_text(tokenizer, sampler.sample_continuation(prompt, options.tokens or TEXT_TOKENS))
    first = next(pieces, "")  # an error is raised before anything is printed
    print_escaped_text(options.prompt, end="")
    return _print_pieces(chain([first], pieces))


def _run_chat(run: Container, options: argparse.Namespace) -> list[ChatMessage]:
    """Answer the user's messages, and return the conversation."""
    tokenizer = run.get(Tokenizer)
    today = date.today().isoformat()
    prompts = TemplatePrompts(tokenizer=tokenizer, template=options.template, date=today, system=options.system)
    with closing(prompts):
        sampler = _make_sampler(
            run, options, context=_choose_chat_context_length(run, options), ends=prompts.answer_end_ids
        )
        messages: list[ChatMessage] = []
        for text in _read_messages(options.prompt):
            messages.append(ChatMessage("user", text))
            prompt = prompts.encode_messages_as_prompt(
                [{"role": message.role, "content": message.content} for message in messages]
            ).tolist()
            messages.append(ChatMessage("assistant", _print_answer(tokenizer, sampler, prompt, options.tokens)))
    return messages if options.system is None else [ChatMessage("system", options.system), *messages]


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


def _choose_chat_context_length(run: Container, options: argparse.Namespace) -> int:
    """Return the longest conversation in tokens. Raises UserError if --context exceeds the model's positions."""
    longest = run.get(LanguageModel).max_sequence_length
    if options.context and longest and options.context > longest:
        raise UserError(f"--context: {options.context} is more than the model's {longest} positions; write fewer", 2)
    return int(options.context or min(longest or CHAT_CONTEXT, CHAT_CONTEXT))


def _make_sampler(run: Container, options: argparse.Namespace, *, context: int, ends: frozenset[int]) -> Sampler:
    """Return a sampler with the options' distribution and seed."""
    return Sampler(
        model=run.get(Predictor),
        pipeline=run.get(Mesh).pipeline_group,
        generator=create_generator(options.seed, "sample"),
        ends=ends,
        context=context,
        temperature=options.temperature,
        top_k=options.top_k,
    )
