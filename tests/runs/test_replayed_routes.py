"""Routes of a sampler, replayed by the learning pass, on one process and on meshes."""

from pathlib import Path

import pytest

from runs.test_rollouts import LAYOUTS, RECIPE, run
from runs.test_turns import ENDS, LOOK, TALK, TURNS
from runs.test_turns import run as run_turns
from support.completion_server import serve
from support.runs import deterministic_rows, series

EXPERTS = "num_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 16\nrouter_aux_loss_coef = 0.0\n"
WORDS = ("rollouts.exact=false", "rollouts.max_tokens=12", "evaluate.every=9", "trainer.steps=2")
REPLAY = ("--overlay", "with_replayed_routes")
MEASURED = ("loss", "grad_norm", "reward")
OTHER_SAMPLER = """
import torch

from drawloom import reward
from drawloom.components.model.decoder.experts import Router

choose = Router.choose_experts


def choose_otherwise(router, scores):
    return choose(router, scores + 0.05 * (1000 * scores).sin() if torch.is_inference_mode_enabled() else scores)


Router.choose_experts = choose_otherwise


@reward
def nothing(completion):
    return 0.0
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    recipe = RECIPE.replace("qwen3.dense", "qwen3.moe").replace("intermediate_size = 32\n", EXPERTS)
    (tmp_path / "tiny.toml").write_text(recipe, "utf-8")
    (tmp_path / "other_sampler.py").write_text(OTHER_SAMPLER, "utf-8")
    return tmp_path


def test_equal_routes_change_nothing(lab: Path) -> None:
    """With a sampler choosing the same experts, a run with replay has the same bits, and a difference of 0."""
    plain, replayed = (deterministic_rows(run(lab, name, *WORDS, *more)) for name, more in (("a", ()), ("b", REPLAY)))
    assert [row.pop("route_difference") for row in replayed] == [0.0, 0.0]
    assert replayed == plain


@pytest.mark.soak
def test_the_learning_pass_visits_the_experts_of_another_sampler(lab: Path) -> None:
    """
    With a sampler sometimes choosing other experts, replay alone restores its log-probabilities, on every mesh, with
    shared prompts, and with layers computed again by the backward pass.
    """
    words = (*WORDS, "--import", "other_sampler.py", "rewards.nothing.use=other_sampler")
    ((before,), *_) = series(run(lab, "plain", *words), "sampler_difference")
    one = run(lab, "one", *words, *REPLAY)
    shared = run(lab, "shared", *words, *REPLAY, "--overlay", "with_shared_prefixes")
    recomputed = run(lab, "recomputed", *words, *REPLAY, "stages.recompute=blocks")
    meshes = [run(lab, name, *words, *REPLAY, *layout, ranks=2) for name, layout in LAYOUTS.items()]
    for folder in (one, shared, recomputed, *meshes):
        assert max(value for (value,) in series(folder, "sampler_difference")) < 1e-4 < 1e-2 < before, folder
        for ours, theirs in zip(series(folder, *MEASURED), series(one, *MEASURED), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), folder
        if folder != shared:  # which counts the choices for a prompt once
            assert series(folder, "route_difference") == series(one, "route_difference"), folder
        assert all(0.01 < value < 0.9 for (value,) in series(folder, "route_difference"))


@pytest.mark.soak  # two runs
def test_the_learning_pass_visits_the_experts_of_all_turns(lab: Path) -> None:
    """In conversations, tokens of all turns and of messages between them visit the experts of another sampler."""
    for name, text in {"turns.toml": TURNS, "ends.py": ENDS, "talk.py": TALK, "look.py": LOOK}.items():
        (lab / name).write_text(text, "utf-8")
    words = ["--import", "other_sampler.py", "rewards.nothing.use=other_sampler", "sampler.exact=false"]
    words += ["evaluate.every=9", "trainer.steps=2"]
    plain, replayed = (run_turns(lab, name, *words, *more) for name, more in (("plain", ()), ("replayed", REPLAY)))
    assert max(value for (value,) in series(plain, "sampler_difference")) > 1e-2
    assert max(value for (value,) in series(replayed, "sampler_difference")) < 1e-4
    assert all(0.01 < value < 0.9 for (value,) in series(replayed, "route_difference"))
    assert min(value for (value,) in series(replayed, "turns")) > 1


@pytest.mark.soak
def test_the_learning_pass_visits_the_experts_of_a_server(lab: Path) -> None:
    """
    Routes in a server's answers, for all layers from 0, restore its log-probabilities, also on pipelines, and for
    several steps from one rollout.
    """
    kept = (word for word in WORDS if "exact" not in word and "=12" not in word)
    with serve(returns_routes=True) as server:
        words = (*kept, "rollouts.max_tokens=5", "rollouts.use=rollouts.server", f"rollouts.url={server.url}")
        ((before,), *_) = series(run(lab, "plain", *words), "sampler_difference")
        one = run(lab, "one", *words, *REPLAY)
        stages = run(lab, "stages", *words, *REPLAY, *LAYOUTS["stages"], ranks=2)
        held = run(lab, "held", *words, *REPLAY, "rollout.minibatches=2", "rollout.lag=1")
    for folder in (one, stages):
        assert max(value for (value,) in series(folder, "sampler_difference")) < 1e-4 < 1e-2 < before, folder
        assert series(folder, "route_difference") == series(one, "route_difference"), folder
    assert series(held, "sampler_difference")[0] < (1e-4,) and series(held, "route_difference")[1] > (0.01,)
