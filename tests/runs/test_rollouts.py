"""Reinforcement learning on one process and on meshes."""

import json
from pathlib import Path

import pytest

from support.processes import run_ranks
from support.runs import QWEN3, command, deterministic_rows, drawloom, rows, series, take_back

RECIPE = (
    """
extends = "grpo"
vars.base = "unused"
tokenizer = { use = "data.bytes" }
device.share = true
batch = { global_size = 4, micro_size = 2 }
rollout.group_size = 4
rollouts = { max_tokens = 5, exact = true }
rewards.regex = { use = "rewards.regex", pattern = "[a-m]" }
validation.rows_used = 4
evaluate = { every = 2, samples = 2 }
optimizer.lr = 1e-2
lr.warmup_steps = 0
checkpoint = { every = 2, keep = 9 }
trainer = { steps = 4, on_finish = [] }
"""
    + QWEN3
    + "initializer_range = 0.3\n"
)
LAYOUTS = {
    "stages": ("mesh.pipeline=2",),
    "shards": ("mesh.data_shard=2", "batch.micro_size=1"),
    "tensor": ("mesh.tensor=2",),
}
SAMPLED = ("reward", "reward/rewards.regex", "length", "truncated", "validation_reward", "tokens")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
    return tmp_path


def run(lab: Path, name: str, *words: str, ranks: int = 1) -> Path:
    outcomes = drawloom(lab, "run", "tiny.toml", f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return lab / "runs" / name


@pytest.mark.soak
def test_ratios_are_exactly_1_and_samples_the_same_on_every_mesh(lab: Path) -> None:
    """
    At lag 0 the sampled log-probabilities have the training pass's bits, on one process and on every mesh.

    Completions, rewards and losses are the same everywhere; with a cache only rounding differs.
    """
    one = run(lab, "one", "trainer.steps=2")
    meshes = [run(lab, name, "trainer.steps=2", *words, ranks=2) for name, words in LAYOUTS.items()]
    for folder in (one, *meshes):
        assert series(folder, "sampler_difference", "ratio", "clip_fraction") == [(0.0, 1.0, 0.0)] * 2
        assert series(folder, *SAMPLED) == series(one, *SAMPLED), folder
        for ours, theirs in zip(series(folder, "loss", "grad_norm"), series(one, "loss", "grad_norm"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), folder
    cached = run(lab, "cached", "rollouts.exact=false", "trainer.steps=1")
    assert series(cached, *SAMPLED[:4]) == [values[:4] for values in series(one, *SAMPLED)][:1]
    ((difference,),) = series(cached, "sampler_difference")
    assert 0 < difference < 1e-4


def test_a_cache_keeps_the_bits_of_batch_invariant_kernels(lab: Path) -> None:
    """With these kernels exact rollouts use a cache, and ratios are 1 on every mesh, with the same samples."""
    words = (
        "kernels.use=kernels.batch_invariant",
        "trainer.steps=2",
        "rollouts.max_tokens=24",
        "rollouts.temperature=0.8",
        "evaluate.every=9",
    )
    one = run(lab, "one", *words)
    meshes = [run(lab, name, *words, *LAYOUTS[name], ranks=2) for name in ("stages", "tensor")]  # shards: see below
    for folder in (one, *meshes):
        assert series(folder, "sampler_difference", "ratio", "clip_fraction") == [(0.0, 1.0, 0.0)] * 2, folder
        assert series(folder, *SAMPLED[:4]) == series(one, *SAMPLED[:4]), folder


def test_experts_keep_the_bits_of_batch_invariant_kernels(lab: Path) -> None:
    """A model with experts has ratios of exactly 1 with a cache, also if ranks partition the experts."""
    recipe = (lab / "tiny.toml").read_text("utf-8").replace("qwen3.dense", "qwen3.moe")
    experts = "num_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 16\n"
    (lab / "tiny.toml").write_text(recipe.replace("intermediate_size = 32\n", experts), "utf-8")
    words = ("kernels.use=kernels.batch_invariant", "trainer.steps=2", "rollouts.max_tokens=12", "evaluate.every=9")
    exchange = ("mesh.expert=2", "dispatcher.use=experts.all_to_all", "stages.dispatcher=@dispatcher")
    one = run(lab, "one", *words)
    ranks = [
        run(lab, name, *words, *LAYOUTS["shards"], *more, ranks=2) for name, more in {"a": (), "b": exchange}.items()
    ]
    for folder in (one, *ranks):
        assert series(folder, "sampler_difference", "ratio", "clip_fraction") == [(0.0, 1.0, 0.0)] * 2, folder
        assert series(folder, *SAMPLED[:4]) == series(one, *SAMPLED[:4]), folder


def test_a_resumed_run_draws_the_same_completions(lab: Path) -> None:
    """A run killed after step 2 repeats steps 3 and 4 with the same bits."""
    folder = run(lab, "straight", "rollouts.exact=false")
    whole, last = deterministic_rows(folder), (folder / "checkpoints/step-4")
    before = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    take_back(folder, 2)
    run(lab, "straight", "rollouts.exact=false")
    assert deterministic_rows(folder) == whole and len(whole) == 4
    assert {path.name: path.read_bytes() for path in last.glob("rank-*")} == before != {}


def test_several_steps_learn_from_one_rollout(lab: Path) -> None:
    """
    With two minibatches and two epochs, a policy learns for four steps from one rollout, at another temperature.

    The ratio is exactly 1 at the first step alone. A resume in between has the same bits, on another mesh the same
    samples; every step has other prompts than the last one.
    """
    reuse = ("rollout.minibatches=2", "rollout.epochs=2", "rollouts.temperature=0.7")
    words = (*reuse, "trainer.steps=6", "checkpoint.every=3", "evaluate.every=6")
    folder = run(lab, "reused", *words)
    measured = rows(folder)
    ratios = [row["ratio"] for row in measured]
    assert [ratio == 1.0 for ratio in ratios] == [True, False, False, False, True, False]
    assert [row.get("sampler_difference") for row in measured] == [0.0, None, None, None, 0.0, None]
    entropies = [row["entropy"] for row in measured]
    assert entropies[:2] == entropies[2:4] and len({*entropies}) == 4
    whole, last = deterministic_rows(folder), folder / "checkpoints/step-6"
    before = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    sampled = series(folder, *SAMPLED[:4])
    take_back(folder, 3)
    run(lab, "reused", *words)
    assert deterministic_rows(folder) == whole
    assert {path.name: path.read_bytes() for path in last.glob("rank-*")} == before != {}
    take_back(folder, 3)
    run(lab, "reused", *words, *LAYOUTS["shards"], ranks=2)
    assert series(folder, *SAMPLED[:4]) == sampled
    for ours, theirs in zip(series(folder, "loss", "ratio"), measured, strict=True):
        assert ours == pytest.approx((theirs["loss"], theirs["ratio"]), rel=1e-4, abs=1e-6)


OLD_WEIGHTS = """
import torch
from drawloom import component, setting, internal
from drawloom.ports import Parameters, Rollouts

@component
class OldWeights:
    \"\"\"A sampler that keeps all steps' weights, and samples with old ones.\"\"\"

    sampler: Rollouts
    parameters: Parameters
    age: int = setting("age of the weights in updates")
    _kept: list = internal(factory=list)

    @property
    def temperature(self):
        return self.sampler.temperature

    def update_weights(self, purpose, step):
        if purpose == "train":
            self._kept.append([parameter.detach().clone() for _, parameter in self.parameters.named_parameters()])

    def sample(self, prompts, purpose, step):
        if purpose == "train":
            self._write(self._kept[max(0, len(self._kept) - 1 - self.age)])
        try:
            return self.sampler.sample(prompts, purpose, step)
        finally:
            if purpose == "train":
                self._write(self._kept[-1])

    @torch.no_grad()
    def _write(self, values):
        for (_, parameter), value in zip(self.parameters.named_parameters(), values, strict=True):
            parameter.copy_(value)
"""
LAG = ("rollout.lag=2", "rollouts.exact=false", "trainer.steps=4", "evaluate.every=2")


def test_a_lag_has_the_bits_of_a_sampler_with_old_weights(lab: Path) -> None:
    """
    With `lag = 2` every step learns what a sampler with the weights of two updates before draws for the same prompts.

    A resume, with two rollouts still to be learnt from, has the same bits, and on another mesh the same samples.
    """
    (lab / "old.py").write_text(OLD_WEIGHTS, "utf-8")
    old = ("--import", "old.py", "rollouts.use=old", "rollouts.age=2", "rollouts.sampler=@sampler")
    sampler = ("sampler.use=rollouts.stages", "sampler.max_tokens=5")
    nodes = ("rollout.rollouts=@rollouts", "evaluate.rollouts=@rollouts")
    expected = run(lab, "expected", *LAG[2:], *old, *sampler, *nodes)
    folder = run(lab, "lagging", *LAG)
    assert [lag for (lag,) in series(folder, "lag")] == [0, 1, 2, 2]
    names = (*SAMPLED, "loss", "grad_norm", "ratio", "sampler_difference", "entropy")
    assert series(folder, *names) == series(expected, *names)
    ratios = [ratio for (ratio,) in series(folder, "ratio")]
    assert ratios[0] == pytest.approx(1.0, abs=1e-5) and all(abs(ratio - 1) > 1e-4 for ratio in ratios[1:])
    whole, last = deterministic_rows(folder), folder / "checkpoints/step-4"
    before = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    take_back(folder, 2)
    run(lab, "lagging", *LAG)
    assert deterministic_rows(folder) == whole
    assert {path.name: path.read_bytes() for path in last.glob("rank-*")} == before != {}
    sampled = series(folder, *SAMPLED[:4])
    take_back(folder, 2)
    run(lab, "lagging", *LAG, *LAYOUTS["shards"], ranks=2)
    assert series(folder, *SAMPLED[:4]) == sampled


def test_a_reference_without_adapters_pulls_the_policy_back(lab: Path) -> None:
    """
    The divergence from the model without its adapters, or from a frozen copy while all weights are trained, is 0 at the
    first step, and positive from then on.
    """
    lora = (
        'adapters.lora={use="adapters.lora", targets=["*_proj"], rank=4, alpha=8.0}',
        'stages.adapters=["@adapters.*"]',
    )
    run(lab, "initial", "trainer.steps=1", "optimizer.lr=1e-30")
    (exported,) = drawloom(lab, "export", "runs/initial", "--to", "initial")
    assert exported.code == 0, exported.text
    frozen = ("copy.use=stages.frozen", 'copy.model={use="model.auto", path="initial"}')
    words = ("loss.beta=0.1", 'metrics.kl={use="metrics.mean", of="kl"}', "checkpoint.every=99")
    for reference, nodes in {"adapters": lora, "model": frozen}.items():
        folder = run(lab, reference, *nodes, *words, f"loss.reference={reference}")
        (first, *later) = (value for (value,) in series(folder, "kl"))
        assert abs(first) < 1e-9 and min(later) > 1e-6, reference
        assert series(folder, "sampler_difference") == [(0.0,)] * 4


def test_evaluate_generates_and_prints_the_rewards_of_the_run(lab: Path) -> None:
    """
    With all prompts in the run's evaluations, `evaluate --generate` has its last mean; each reward has a mean, too.
    """
    words = ("validation.rows_used=1000", "examples.examples_drawn=100", "trainer.steps=2", "batch.micro_size=4")
    folder = run(lab, "measured", *words)
    ((reward,),) = [values for values in series(folder, "validation_reward") if values[0] is not None]
    (outcome,) = drawloom(lab, "evaluate", "runs/measured", "--generate", "--format", "json")
    result = json.loads(outcome.text)
    assert result["reward"] == pytest.approx(reward) == pytest.approx(sum(result["rewards"].values()))
    assert result["rewards"].keys() == {"rewards.exact_match", "rewards.regex"} and 1 <= result["length"] <= 5
    (other,) = drawloom(lab, "evaluate", "runs/measured", "--generate", "--samples", "3")
    assert f"tokens, {result['completions'] * 3 // 2} completions" in other.text
    (refused,) = drawloom(lab, "evaluate", "runs/measured")
    assert refused.code == 2 and "the run's batches are PromptBatch" in refused.text


def run_long(folder: Path, *words: str) -> None:
    """Run a command for up to ten minutes."""
    (outcome,) = run_ranks(command, 1, folder, words, None, timeout=600, variables=False)
    assert outcome.code == 0, outcome.text


@pytest.mark.soak  # three minutes on two cores
@pytest.mark.parametrize(("seed", "lag"), [(0, 0), (1, 1)])
def test_the_shipped_recipe_learns_to_sort(tmp_path: Path, seed: int, lag: int) -> None:
    """
    After a short supervised run, the sampled reward on held-out prompts rises clearly, and entropy falls.

    Completions that are one update old teach as much.
    """
    run_long(tmp_path, "run", "sort_digits", "run.name=base", f"run.seed={seed}")
    words = ("vars.base=runs/base/export", "run.name=policy", f"run.seed={seed}", "validation.rows_used=256")
    corrected = (f"rollout.lag={lag}", "loss.correction=token_truncate") if lag else ()
    run_long(tmp_path, "run", "grpo", *words, *corrected)
    lines = (tmp_path / "runs/policy/metrics.jsonl").read_text("utf-8").splitlines()
    held_out = [value for line in lines if (value := json.loads(line).get("validation_reward")) is not None]
    assert 0.2 < held_out[0] < 0.7 and held_out[-1] > held_out[0] + 0.12, held_out
    measured = rows(tmp_path / "runs/policy")
    assert measured[-1]["entropy"] < measured[0]["entropy"]
    assert lag or max(row["sampler_difference"] for row in measured) < 1e-3
