"""
Completions sampled from the training stages: no copy of the weights, on any mesh.

Rows of a batch are aligned at their first token: while a pass is inside a longer prompt, the row's next token is the
prompt's and not the drawn one. So a batch needs no padding on the left, and one cache position serves all rows.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drawloom import NodeView, Problem, UserError, above, between, component, internal, setting, wired
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.rng import derive_seed, draw_splitmix64_bits
from drawloom.components.state.host_copy import HostCopy
from drawloom.components.state.trees import map_leaves
from drawloom.kernels.sampling.eager import draw_ids_logps_and_entropies
from drawloom.ports import (
    MAX_LENGTH,
    BatchInvariant,
    Completions,
    Device,
    Executor,
    Finish,
    Group,
    Head,
    Kernels,
    KeyValueCache,
    Mesh,
    Prompts,
    RunInfo,
    TokenContext,
    Tokenizer,
    compute_policy_logps,
)

TOKENS_BY_ROW = 2**32
"""Stride of rows in the sequence of random numbers: more than the tokens of a row."""


@component
class StageRollouts:
    """
    Sampler that runs the training stages themselves, with a cache of keys and values.

    A row's draws depend on the seed, the step and the row, not on other rows or the mesh. With `exact`,
    log-probabilities have the bits of the training pass, and the ratio of both is exactly 1. With
    `kernels.batch_invariant`, passes use the cache. Otherwise every token is computed by a pass over the whole rows of
    a training microbatch, in every dtype and on every mesh; the cost is one such pass per token.
    """

    model: Executor
    tokenizer: Tokenizer
    job: RunInfo
    mesh: Mesh
    device: Device
    kernels: Kernels | None = wired(default=None)
    max_tokens: int = setting("maximum length of a completion in tokens", check=between(1, MAX_LENGTH))
    temperature: float = setting(
        "divisor of the logits, in sampling and in the policy's log-probabilities", default=1.0, check=above(0)
    )
    exact: bool = setting(
        "whether log-probabilities have the bits of the training pass; slow without `kernels.batch_invariant`",
        default=False,
    )
    _model_group: Group = internal(None)  # ranks that together have the whole model once
    _version: int = internal(0)
    _runs_ahead: bool = internal(False)
    _reports_draws: bool = internal(False)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report context parallelism, under which no rank has whole rows, and compiled blocks, whose bits vary."""
        mesh = node.neighbour("mesh")
        if mesh and mesh.settings.get("context", 1) != 1:
            text = f"[{node.name}] samples whole rows, but ranks along 'context' divide rows"
            yield mesh.problem("context", text, "write context = 1")
        kernels, executor = node.neighbour("kernels"), node.neighbour("model")
        stages = executor.neighbour("stages") if executor else None
        is_exact = node.settings["exact"] and kernels and kernels.implements(BatchInvariant)
        for feature in stages.neighbours("features") if is_exact and stages else ():
            if feature.use == "stages.compiled":
                text = "exact rollouts with a cache need batch-invariant kernels, and torch.compile makes its own"
                yield feature.problem("use", text, f"remove [{feature.name}]")

    def open(self) -> None:
        """Connect the ranks that sample the same rows."""
        self._model_group = self.mesh.group("pipeline", "tensor")
        self._reports_draws = self.mesh.indices.tensor == 0  # ranks along `tensor` have the same logits
        self._runs_ahead = self.device.device.type == "cuda" and self._model_group.size == 1

    def update_weights(self, purpose: str, step: int) -> None:
        """Note the version: the stages have the current weights."""
        self._version = max(step - 1, 0)

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        """Complete the prompts. Raises UserError on all ranks if the logits are not finite."""
        key = derive_seed(self.job.seed, "rollouts", purpose, step)
        if self._recomputes_rows_per_token:
            return [self._sample_completions_on_all_ranks(microbatch, key) for microbatch in prompts]
        together = Prompts(
            tokens=torch.cat([microbatch.tokens for microbatch in prompts]),
            lengths=torch.cat([microbatch.lengths for microbatch in prompts]),
            keys=torch.cat([microbatch.keys for microbatch in prompts]),
            end_ids=tuple(ids for microbatch in prompts for ids in microbatch.end_ids_by_row(self.tokenizer)),
            turns=prompts[0].turns if prompts else None,
        )
        return _split_completions(
            self._sample_completions_on_all_ranks(together, key),
            [len(microbatch.lengths) for microbatch in prompts],
        )

    @property
    def _recomputes_rows_per_token(self) -> bool:
        """Whether each token needs a pass over whole rows for the bits of the training pass."""
        return self.exact and not isinstance(self.kernels, BatchInvariant)

    def _sample_completions_on_all_ranks(self, prompts: Prompts, seed: int) -> Completions:
        """
        Sample trajectories for a batch of prompts; `seed` is for all draws. A collective over all ranks.

        An environment's message is read like a longer prompt: one pass per token, with the same cache.
        """
        rows, prompt_length = prompts.tokens.shape
        length, end = prompt_length + self.max_tokens, self.tokenizer.eos_id
        end_ids = pad_sequence([torch.tensor([*ids]) for ids in prompts.end_ids_by_row(self.tokenizer)], True, -1)
        tokens = torch.full((rows, length), end)
        tokens[:, :prompt_length] = torch.where(
            torch.arange(prompt_length) < prompts.lengths[:, None], prompts.tokens, end
        )
        logps, entropies = torch.zeros(2, rows, length)
        ends, is_ended = prompts.lengths + self.max_tokens, torch.zeros(rows, dtype=torch.bool)
        known = prompts.lengths.clone()  # tokens of a row before its current turn
        is_sampled = torch.zeros(rows, length, dtype=torch.bool)
        cache = None if self._recomputes_rows_per_token else KeyValueCache(length)
        position = self._shortest_prompt_over_ranks(prompts.lengths)
        scale = None if self.temperature == 1 else torch.full((), self.temperature, device=self.device.device)
        start = partial(
            self._start_draw, prompts=prompts, seed=seed, tokens=tokens, starts=known, cache=cache, scale=scale
        )
        following: PendingDraw | None = None
        while position < (longest := self._last_end_over_ranks(ends)):
            pending, following = following or start(position=position), None
            is_drawn = (position >= known) & (position < ends)
            if self._runs_ahead and cache is not None and cache.length == position and position + 1 < longest:
                # The device draws the next ids while the host reads these: messages follow two positions later.
                given = self._start_upload(torch.stack([is_drawn.long(), tokens[:, position]]))
                last_ids = torch.where(given[0] > 0, pending.result[:, 0].long(), given[1])
                following = start(position=position + 1, last_ids=last_ids)
            drawn = self._wait_for_draw(pending)
            ids = drawn[:, 0].long()
            tokens[:, position] = torch.where(is_drawn, ids, tokens[:, position])
            logps[:, position - 1] = torch.where(is_drawn, drawn[:, 1], 0.0)
            entropies[:, position - 1] = torch.where(is_drawn, drawn[:, 2], 0.0)
            is_sampled[:, position] = is_drawn
            now_ended = is_drawn & (ids[:, None] == end_ids).any(1)
            is_ended |= now_ended
            ends = torch.where(now_ended, position + 1, ends)
            position += 1
            stopped = now_ended.nonzero()[:, 0].tolist()
            for row, message in self._collect_messages(prompts, stopped, tokens, known, ends):
                last = position + len(message)
                is_ended[row] = False
                if last < prompts.lengths[row] + self.max_tokens:  # otherwise the trajectory is cut after this turn
                    tokens[row, position:last] = torch.tensor(message, dtype=torch.int64)
                    known[row], ends[row] = last, prompts.lengths[row] + self.max_tokens
        versions = is_sampled.int() * self._version
        return Completions(
            tokens, prompts.lengths, ends, logps, entropies, is_ended, is_sampled=is_sampled, versions=versions
        )

    def _collect_messages(
        self, prompts: Prompts, rows: list[int], tokens: Tensor, known: Tensor, ends: Tensor
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield rows whose conversation continues, with the ids before the next turn. A collective."""
        turns = prompts.turns
        if turns is None or not rows:  # the same rows have ended on all ranks with them
            return
        keys, sampled = prompts.keys[rows].tolist(), [tokens[row, known[row] : ends[row]].tolist() for row in rows]
        messages = run_on_rank0(self._model_group, lambda: turns.continue_rows(keys, sampled))
        yield from ((row, message) for row, message in zip(rows, messages, strict=True) if message is not None)

    def _start_draw(
        self,
        *,
        prompts: Prompts,
        seed: int,
        tokens: Tensor,
        starts: Tensor,
        cache: KeyValueCache | None,
        scale: Tensor | None,
        position: int,
        last_ids: Tensor | None = None,
    ) -> "PendingDraw":
        """
        Start to draw an id per row for `position` at a temperature, `scale` () on the device. A collective.

        `tokens`, int64 (rows, length), are known before `position`; `starts`, int64 (rows,), are the first positions of
        the rows' current turns. `last_ids`, int64 (rows,) on the device, stand for the column of `tokens` before
        `position`. A pass computes tokens that are not in the cache, or, without a cache, whole rows.
        """
        first, last = (0, tokens.shape[1]) if cache is None else (cache.length, position)
        window = tokens[:, first:last] if last_ids is None else last_ids[:, None]
        positions = torch.arange(first, last, device=window.device).expand(len(tokens), -1)
        context = TokenContext(positions, torch.zeros_like(window), cache=cache, one_document_per_row=cache is None)
        counters = prompts.keys * TOKENS_BY_ROW + (position - prompts.lengths).clamp_min(0)
        uniforms = self._start_upload(draw_uniform_by_counter(seed, counters))
        draw = _Draw(uniforms, scale, self.exact and cache is not None)
        finish: Finish = draw
        if cache is None:
            finish = partial(_draw_and_recompute, draw=draw, tokens=tokens, starts=starts, position=position)
        outputs: dict[int, Tensor] = {}
        self.model.infer_microbatches([(window, context)], outputs.__setitem__, finish)
        if cache is not None:
            self._end_cached_pass(cache, window.shape[1])
        # Ranks without the result add zeros in `_wait_for_draw`.
        result = outputs[0] if outputs and self._reports_draws else torch.zeros(len(tokens), 3, dtype=torch.float64)
        return PendingDraw(result, HostCopy.start({"drawn": result}))

    def _end_cached_pass(self, cache: KeyValueCache, length: int) -> None:
        """
        End a pass over `length` tokens per row. A collective.

        Raises UserError on all ranks if draws must be exact, and the cache has recurrent states, or nothing.
        """
        layers = torch.tensor([cache.cached_layer_count, cache.has_states])
        self._model_group.sum(layers)  # a rank has the layers of its own stages
        if self.exact and (layers[1] or not layers[0]):
            raise UserError(
                "exact rollouts need a model whose layers all use the cache for keys and values; "
                'write use = "kernels.auto" in the kernels',
                exit_code=2,
            )
        if layers[0]:  # a plugin's model may not use the cache
            cache.end_pass(length)

    def _wait_for_draw(self, pending: "PendingDraw") -> Tensor:
        """Return ids, log-probabilities and entropies: float64 (rows, 3). A collective."""
        drawn = pending.copy.read()["drawn"]
        self._model_group.sum(drawn)
        if not drawn.isfinite().all():
            raise UserError("no completion can be sampled: the model's logits are not finite; lower the learning rate")
        return drawn

    def _start_upload(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device; neither the host nor operations before it are waited for."""
        device = self.device.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def _shortest_prompt_over_ranks(self, lengths: Tensor) -> int:
        """Return the shortest prompt's length over all ranks, because every pass may gather sharded parameters."""
        shortest = -lengths.min()
        self.mesh.world.max(shortest)
        return -int(shortest)

    def _last_end_over_ranks(self, ends: Tensor) -> int:
        """Return the position behind the last row to continue on any rank."""
        longest = ends.max().clone()
        self.mesh.world.max(longest)
        return int(longest)


class PendingDraw(NamedTuple):
    """Drawn ids, log-probabilities and entropies: float64 (rows, 3) on the device, and on their way to the host."""

    result: Tensor
    copy: HostCopy


@attrs.frozen(eq=False)
class _Draw:
    """Draw from the last position's logits: a function to float64 (rows, 3)."""

    is_recordable: ClassVar[bool] = True

    uniforms: Tensor
    temperature: Tensor | None
    is_exact: bool

    def __call__(self, hidden: Tensor, head: Head) -> Tensor:
        last = hidden[:, -1:]
        drawn = draw_ids_logps_and_entropies(head.logits(last)[:, 0], self.uniforms, self.temperature)
        if self.is_exact:
            ids = drawn[:, :1].long()
            drawn[:, 1] = compute_policy_logps(last, head, ids, ids >= 0, self.temperature)[:, 0]
        return drawn


def draw_uniform_by_counter(key: int, counters: Tensor) -> Tensor:
    """
    Return a random number in [0, 1) per counter, the same for equal keys and counters: float64 (rows,).

    counters: int64 (rows,).
    """
    return (draw_splitmix64_bits(key, counters) >> 11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def _draw_and_recompute(
    hidden: Tensor, head: Head, *, draw: _Draw, tokens: Tensor, starts: Tensor, position: int
) -> Tensor:
    """
    Draw for `position` from hidden states of whole rows; return float64 (rows, 3).

    The drawn ids' log-probabilities come from the operation and the shapes that a loss uses.
    """
    drawn, (tokens, starts) = draw(hidden[:, :position], head), (x.to(hidden.device) for x in (tokens, starts))
    targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    targets[:, position - 1] = drawn[:, 0].long()
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_target = (columns >= starts[:, None] - 1) & (columns < position)
    logps = compute_policy_logps(hidden, head, targets, is_target, draw.temperature)
    drawn[:, 1] = torch.where(position >= starts, logps[:, position - 1], 0.0)
    return drawn


def _split_completions(completions: Completions, row_counts: Sequence[int]) -> list[Completions]:
    """Split completions into batches with these row counts."""
    slices = [slice(end - count, end) for end, count in zip(accumulate(row_counts), row_counts, strict=True)]
    return [map_leaves(partial(_select_rows, rows=part), completions) for part in slices]


def _select_rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]
