"""Adapter from a run's model to the lm-eval-harness model interface."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from drawloom import UserError
from drawloom.components.commands._trained import infer_documents, pad_documents
from drawloom.components.distributed.rng import create_generator
from drawloom.components.sampling.generate import Sampler
from drawloom.ports import Executor, Group, Tokenizer, complete_prompt, find_end_ids

OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
"""Supported options of tasks that generate text."""


class _TargetScore(NamedTuple):
    """The sum of targets' log-probabilities, and whether all targets are the likeliest tokens."""

    logp: float
    is_greedy: bool


class RunModel(TemplateLM):  # type: ignore[misc]
    """
    Model for lm-eval-harness, computed by a predictor in this process.

    `context` is the sequence length limit in tokens. Texts begin as in training: with the tokenizer's `prefix_ids`, or
    after an end-of-text token. Batches have `rows` requests with similar lengths.
    """

    def __init__(self, predictor: Executor, tokenizer: Tokenizer, pipeline: Group, context: int, rows: int) -> None:
        super().__init__()
        self.predictor = predictor
        self.tokens = tokenizer
        self.pipeline = pipeline
        self.context = context
        self.rows = rows

    @property
    def eot_token_id(self) -> int:
        """End-of-text token id."""
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The last id before a text."""
        return self._text_start[-1]

    @property
    def _text_start(self) -> list[int]:
        """All ids before a text."""
        ids: list[int] = complete_prompt(self.tokens, np.empty(0, np.int32)).tolist()
        return ids

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's token ids, after the tokenizer's `prefix_ids` unless `add_special_tokens` is False."""
        ids = self.tokens.encode(string)
        return [int(token) for token in (ids if add_special_tokens is False else complete_prompt(self.tokens, ids))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods for whole texts, computed in disjoint context windows."""
        totals = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.context, 1)
            pairs = [(("", ""), *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to the first stop string in the task's list."""
        return [self._continue_text(text, dict(options)) for text, options in (request.args for request in requests)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[_TargetScore]:
        """Return for (texts, context ids, target ids) the targets' log-likelihood, and whether all are likeliest."""
        # The model does not see the last token, so that one token more than the context fits.
        starts = [self._text_start if before == [self.prefix_token_id] else before for _, before, _ in requests]
        texts = [
            ([*start, *after][-self.context - 1 :], len(after))
            for start, (_, _, after) in zip(starts, requests, strict=True)
        ]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number][0]))
        scored = infer_documents([texts[number] for number in order], self.rows, self._score_batch)
        scores = {number: score for number, (_, score) in zip(order, scored, strict=True)}
        return [scores[number] for number in range(len(texts))]

    def _score_batch(self, ids_and_target_counts: Sequence[tuple[list[int], int]]) -> list[_TargetScore] | None:
        """Score every text's last tokens, as many as its target count; None without the last stage."""
        tokens, context = pad_documents([ids[:-1] for ids, _ in ids_and_target_counts])
        logits = self.predictor.infer(tokens, context)
        if logits is None:
            return None
        return [
            _score_targets(logits[row, : len(ids) - 1][-count:], ids[-count:])
            for row, (ids, count) in enumerate(ids_and_target_counts)
        ]

    def _continue_text(self, text: str, generation_options: dict[str, Any]) -> str:
        """Sample a continuation with a task's options. Raises UserError for unknown options, or for too many tokens."""
        if unknown := sorted(generation_options.keys() - OPTIONS):
            known = ", ".join(sorted(OPTIONS))
            raise UserError(
                f"a task sets {', '.join(unknown)} for generation, and only {known} are supported; leave the task out"
            )
        until = generation_options.get("until") or []
        ends = [until] if isinstance(until, str) else until
        max_tokens = generation_options.get("max_gen_toks", 256)
        if max_tokens >= self.context:
            raise UserError(
                f"the context has no room for a task's {max_tokens} tokens; write --context {max_tokens + 1} or more"
            )
        prompt = self.tok_encode(text)[-(self.context - max_tokens) :]
        sampler = Sampler(
            model=self.predictor,
            pipeline=self.pipeline,
            generator=create_generator(0, "sample"),
            ends=find_end_ids(self.tokens),
            context=self.context,
            temperature=generation_options.get("temperature", 1.0) if generation_options.get("do_sample") else 0.0,
            top_k=generation_options.get("top_k"),
        )
        ids, continuation = list[int](), ""
        for token in sampler.sample_continuation(prompt, max_tokens):
            ids.append(token)
            continuation = self.tokens.decode(ids)
            if continuation != (cut := _cut_at_stop_string(continuation, ends)):
                return cut
        return continuation


def _score_targets(logits: Tensor, targets: Sequence[int]) -> _TargetScore:
    """Score target ids by logits (targets, vocab_size)."""
    ids = torch.tensor(targets, device=logits.device)
    logps = logits.double().log_softmax(-1).gather(-1, ids[:, None])
    return _TargetScore(float(logps.sum()), bool((logits.argmax(-1) == ids).all()))


def _cut_at_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((index for end in stop_strings if end and (index := text.find(end)) >= 0), default=len(text))]
