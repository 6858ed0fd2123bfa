"""Final task: a short text sampled from the trained model."""

from pathlib import Path
from typing import TYPE_CHECKING

from drawloom import UserError, above, at_least, between, component, setting
from drawloom.ports import (
    MAX_LENGTH,
    AveragedWeights,
    ChatPrompts,
    Executor,
    Mesh,
    Randomness,
    RunFolder,
    Tokenizer,
    complete_prompt,
    find_end_ids,
    run_log,
    use_averages_if_any,
)

if TYPE_CHECKING:
    from drawloom.components.sampling.generate import Sampler

MAX_LOGGED = 300
"""Characters of a text that are logged; the rest is in the file."""

HEADING = "# after step %d\n"
"""The file's first line."""


@component(impact="safe")
class Sample:
    """
    Final task that continues a prompt, and writes `<run folder>/sample.txt`: a line with the step, then the text.

    With `chat`, the prompt is a user's message, and the text is the conversation with the model's answer. The beginning
    of the text is logged.
    """

    model: Executor
    tokenizer: Tokenizer
    folder: RunFolder
    randomness: Randomness
    mesh: Mesh
    average: AveragedWeights | None = None
    chat: ChatPrompts | None = None
    prompt: str = setting("beginning of the text, or the user's message", default="")
    tokens: int = setting("maximum tokens to sample", default=200, check=between(1, MAX_LENGTH + 1))
    context: int = setting("number of last tokens that the model sees", default=256, check=between(1, MAX_LENGTH + 1))
    temperature: float = setting(
        "sampling temperature; 0 is greedy: always the most likely token", default=0.8, check=at_least(0)
    )
    top_k: int | None = setting(
        "number of most likely tokens to sample from; default: all", default=None, check=above(0)
    )

    def has_result_of_step(self, step: int) -> bool:
        """Return whether `sample.txt` on rank 0 already has this step's text. A collective, equal on all ranks."""
        from drawloom.components.distributed.rank_errors import run_on_rank0
        from drawloom.components.storage.durable_files import does_file_begin_with

        heading = (HEADING % step).encode()
        return bool(run_on_rank0(self.mesh.world, lambda: does_file_begin_with(self._sample_path, heading)))

    def run_after_training(self, step: int) -> None:
        """Sample the text on the first pipeline, and write it on rank 0. A collective."""
        from drawloom.components.distributed.rank_errors import run_on_rank0

        with use_averages_if_any(self.average):
            text = self._sample_text_or_error() if self.mesh.replica_group.rank == 0 else ""
        run_on_rank0(self.mesh.world, lambda: self._log_and_write_text(step, text))

    def _sample_text_or_error(self) -> str:
        """Sample the text, or return an error as text, so that a diverged run still writes its report."""
        try:
            return self._sample_text() if self.chat is None else self._sample_conversation(self.chat)
        except UserError as error:
            return f"({error})"

    def _sample_text(self) -> str:
        """Return the prompt with its continuation."""
        prompt = complete_prompt(self.tokenizer, self.tokenizer.encode(self.prompt)).tolist()
        sampler = self._make_sampler(find_end_ids(self.tokenizer))
        return self.prompt + self.tokenizer.decode([*sampler.sample_continuation(prompt, self.tokens)])

    def _sample_conversation(self, chat: ChatPrompts) -> str:
        """Return the user's message with the model's answer."""
        prompt = chat.encode_messages_as_prompt([{"role": "user", "content": self.prompt}]).tolist()
        answer = self._make_sampler(chat.answer_end_ids).sample_continuation(prompt, self.tokens)
        return f"user: {self.prompt}\nassistant: {self.tokenizer.decode([*answer])}"

    def _log_and_write_text(self, step: int, text: str) -> None:
        """Log the text's beginning, and replace the file."""
        from drawloom.components.storage.durable_files import replace_file

        more = f"\n... ({len(text):,} characters in {self._sample_path})" if len(text) > MAX_LOGGED else ""
        run_log.info("a sample:\n%s%s", text[:MAX_LOGGED], more)
        replace_file(self._sample_path, f"{HEADING % step}{text}\n".encode())

    def _make_sampler(self, ends: frozenset[int]) -> "Sampler":
        """Return a sampler with this task's settings, which stops at the ids `ends`."""
        from drawloom.components.sampling.generate import Sampler

        return Sampler(
            model=self.model,
            pipeline=self.mesh.pipeline_group,
            generator=self.randomness.stream("sample"),
            ends=ends,
            context=self.context,
            temperature=self.temperature,
            top_k=self.top_k,
        )

    @property
    def _sample_path(self) -> Path:
        """Path to the text file."""
        return self.folder.folder / "sample.txt"
