"""Completions sampled from a run's stages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.model import Head, TokenContext
from drawloom.components.ports.rollouts import Completions, Prompts
from drawloom.components.rollouts.stages import StageRollouts, draw_uniform_by_counter
from drawloom.components.run.trainer import Trainer
from drawloom.graph import UserError
from support.observers_of_runs import TINY
from support.recorders import use_recorder
from support.small_rollouts import END, NEW, logits_of, open_run

PROMPTS = ["31044>", "9>", "5512345>", "0>"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a run's open nodes with a small random model, whose distributions are far from uniform."""
    with open_run(tmp_path_factory.mktemp("run")) as objects:
        yield objects


CAPTURE: dict[str, Any] = {"capture": {"use": "pipeline.captured"}}


def prompts_of(texts: list[str], keys: list[int]) -> Prompts:
    """Prompts in bytes, padded to 8 tokens with another id than a run's."""
    tokens = torch.full((len(texts), 8), 7)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(list(text.encode()))
    return Prompts(tokens, torch.tensor([len(text) for text in texts]), torch.tensor(keys))


def sample(run: Any, *prompts: Prompts, step: int = 1, **changes: Any) -> list[Completions]:
    rollouts: StageRollouts = attrs.evolve(run["rollouts"], **changes)
    rollouts.open()
    return rollouts.sample(prompts, "train", step)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_completions_have_log_probabilities_from_a_whole_pass(run: Any, temperature: float) -> None:
    """
    With and without a cache, different prompts have the log-probabilities and entropies from one whole pass.

    A completion begins after its prompt, and ends with the end token or at the maximum length; the rest is padding.
    """
    prompts = prompts_of(PROMPTS * 8, [*range(32)])
    (cached,), (exact,) = (sample(run, prompts, exact=exact, temperature=temperature) for exact in (False, True))
    assert cached.tokens.equal(exact.tokens) and cached.ends.equal(exact.ends)
    end = run["tokenizer"].eos_id
    for row, length in enumerate(prompts.lengths.tolist()):
        first, last = int(cached.starts[row]), int(cached.ends[row])
        assert first == length and cached.tokens[row, :first].equal(prompts.tokens[row, :first])
        sampled = cached.tokens[row, first:last]
        assert bool(cached.is_ended[row]) == (int(sampled[-1]) == end) and end not in sampled[:-1]
        assert len(sampled) == NEW or cached.is_ended[row]
        assert (cached.tokens[row, last:] == end).all()
    whole = (logits_of(run, cached.tokens) / temperature).log_softmax(-1)
    following = torch.cat([cached.tokens[:, 1:], cached.tokens[:, :1]], 1)
    logps = whole.gather(-1, following[..., None])[..., 0].where(cached.is_target, 0.0)
    entropies = -(whole.exp() * whole).sum(-1).where(cached.is_target, 0.0)
    for completions in (cached, exact):
        torch.testing.assert_close(completions.logps, logps, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(completions.entropies, entropies, atol=1e-4, rtol=1e-4)
    assert int(cached.is_target.sum()) == int(cached.sampled_counts.sum())


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_recorded_passes_draw_the_same_completions(tmp_path: Path, stages_per_rank: int) -> None:
    """
    Passes over one token are recorded for each batch and stage, and change no bit of batch-invariant kernels.

    The graph is freed with the cache, and a sliding window sees the same tokens.
    """
    schedule = {"use": "pipeline.schedules.interleaved_1f1b", "stages_per_rank": stages_per_rank}
    changes: dict[str, Any] = {
        "schedule": schedule if stages_per_rank > 1 else {},
        "kernels": {"use": "kernels.batch_invariant"},
        "model": {"use": "model.gemma3", **TINY, "initializer_range": 0.3, "sliding_window": 4},
    }
    prompts, sampled = prompts_of(PROMPTS * 8, [*range(32)]), []
    for capture in (False, True):
        with (
            use_recorder(may_read=False) as recorder,
            open_run(tmp_path, **changes, **(CAPTURE if capture else {})) as run,
        ):
            sampled.append([sample(run, prompts, exact=True)[0] for _ in range(2)])
            assert recorder.recorded == (2 * stages_per_rank if capture else 0)
            if capture:
                graphs = run["executor"].features[0]._graphs.values()
                assert [len(stage._token_passes) for stage in graphs] == [0] * stages_per_rank
    for plain, recorded in zip(*sampled, strict=True):
        for name in ("tokens", "ends", "logps", "entropies"):
            assert getattr(plain, name).equal(getattr(recorded, name)), name


def test_recorded_steps_learn_the_same(tmp_path: Path) -> None:
    """Steps of GRPO, whose passes for sampling and training are recorded, have the bits of steps that run."""
    weights, batch = [], {"global_size": 4, "micro_size": 2}
    changes: dict[str, Any] = {
        "kernels": {"use": "kernels.batch_invariant"},
        "batch": batch,
        "rollout": {"group_size": 4},
    }
    changes |= {"rewards": {"regex": {"use": "rewards.regex", "pattern": "[a-m]"}}, "evaluate": {"every": "never"}}
    changes |= {"checkpoint": {"best": "loss", "best_is": "lowest", "every": "never"}, "lr": {"warmup_steps": 0}}
    changes |= {"trainer": {"steps": 3, "on_finish": []}}
    for capture in (False, True):
        folder = tmp_path / str(capture)
        with (
            use_recorder(may_read=False) as recorder,
            open_run(folder, (), **changes, **(CAPTURE if capture else {})) as run,
        ):
            for step in run.get(Trainer).run_and_yield_steps():
                # one in each step for sampling, and two in the second for a microbatch's passes
                assert recorder.recorded == (step.index + 2 * (step.index > 1) if capture else 0)
            weights.append([parameter.detach().clone() for _, parameter in run["stages"].named_parameters()])
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))


def test_exact_log_probabilities_have_the_bits_of_the_training_pass(run: Any) -> None:
    """The loss's operation and shapes give every sampled token the same bits, which a cache does not."""
    (exact,) = sample(run, prompts_of(PROMPTS * 4, [*range(16)]), exact=True)
    targets = torch.cat([exact.tokens[:, 1:], exact.tokens[:, :1]], 1).where(exact.is_target, -100)
    rows: dict[int, Tensor] = {}

    def finish(hidden: Tensor, head: Head) -> Tensor:
        return -head.token_losses(hidden, targets, exact.is_target.float())[0]

    context = TokenContext(torch.arange(exact.tokens.shape[1]).expand(16, -1), torch.zeros_like(exact.tokens))
    run["executor"].infer_microbatches([(exact.tokens, context)], rows.__setitem__, finish)
    assert rows[0].equal(exact.logps)


def test_a_row_is_drawn_by_its_key_alone(run: Any) -> None:
    """Rows in another order, in other microbatches or beside others are the same; another key, step or purpose not."""
    keys = [5, 3, 9, 4]
    (together,) = sample(run, prompts_of(PROMPTS, keys))
    order = [2, 0, 3, 1]
    parts = [prompts_of([PROMPTS[row]], [keys[row]]) for row in order]
    for row, part in zip(order, sample(run, *parts), strict=True):
        assert part.tokens[0].equal(together.tokens[row]) and part.ends[0] == together.ends[row]
    (same,) = sample(run, prompts_of(["9>"] * 64, [*range(64)]))
    assert len({tuple(tokens.tolist()) for tokens in same.tokens}) > 32
    for other in (sample(run, prompts_of(PROMPTS, [1, 2, 6, 7])), sample(run, prompts_of(PROMPTS, keys), step=2)):
        assert not other[0].tokens.equal(together.tokens)


def test_uniform_numbers_are_spread_over_the_interval() -> None:
    """Neighbouring counters give uncorrelated numbers in [0, 1) with a uniform mean and variance."""
    numbers = draw_uniform_by_counter(7, torch.arange(100_000))
    assert 0 <= float(numbers.min()) < 1e-4 and 1 - 1e-4 < float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.005 and abs(float(numbers.var()) - 1 / 12) < 0.002
    assert abs(float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])) < 0.02


def test_a_row_ends_at_its_own_end_ids(run: Any) -> None:
    """Rows with an end id are the rows without it, cut after this id, beside rows with other ends."""
    prompts = prompts_of(PROMPTS * 2, [*range(8)])
    (plain,) = sample(run, prompts)
    ids = [int(plain.tokens[row, plain.starts[row] + 2]) for row in range(8)]
    ends = tuple(frozenset({token, END} if row % 2 else {END}) for row, token in enumerate(ids))
    (cut,) = sample(run, attrs.evolve(prompts, end_ids=ends))
    for row, token in enumerate(ids):
        start, end = int(plain.starts[row]), int(plain.ends[row])
        sampled = plain.tokens[row, start:end].tolist()
        count = sampled.index(token) + 1 if row % 2 else len(sampled)
        assert cut.tokens[row, start : int(cut.ends[row])].tolist() == sampled[:count]
        assert bool(cut.is_ended[row]) == (row % 2 == 1 or bool(plain.is_ended[row]))
        assert not cut.logps[row, start + count :].any()


def test_logits_that_are_not_finite_end_the_run(run: Any) -> None:
    """A diverged model samples nothing."""
    parameter = next(iter(run["executor"].stages.local)).module.get_parameter("model.norm.weight")
    with torch.no_grad():
        before = parameter.clone()
        parameter.fill_(torch.nan)
        try:
            with pytest.raises(UserError, match="no completion can be sampled: the model's logits are not finite"):
                sample(run, prompts_of(PROMPTS, [0, 1, 2, 3]))
        finally:
            parameter.copy_(before)
