"""The policy-gradient losses against formulas in float64."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.loss.grpo import Grpo
from drawloom.components.ports.rollouts import PolicyBatch
from drawloom.graph import UserError
from support.losses import Sample, sample
from support.qwen3 import cpu_kernels, dense, one_document, whole
from support.seeding import seeds
from support.text_trees import draw_texts

ADVANTAGES = torch.tensor([[1.5], [-0.7], [0.4]])
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def policy_case(drift: float = 0.8) -> tuple[Sample, PolicyBatch]:
    """Rows with 3, 2 and 0 sampled tokens, whose sampled log-probabilities differ by about `drift`."""
    case = sample()
    is_target = torch.zeros(3, 5, dtype=torch.bool)
    is_target[0, 1:4], is_target[1, 3:] = True, True
    targets = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(3)).where(is_target, -100)
    noise = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(4)) * drift
    logps = logps_of(case, targets).detach()
    values: dict[str, Any] = {name: value for name, _, value in case.batch.named_tensors()}
    values |= {"targets": targets, "weights": is_target.float()}
    sampled, reference = ((logps + part).where(is_target, 0.0) for part in noise)
    advantages = ADVANTAGES.double().where(is_target, 0.0)
    return case, PolicyBatch(**values, logps=sampled, advantages=advantages, reference=reference)


def logps_of(case: Sample, targets: Tensor) -> Tensor:
    return case.logits().log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def by_rows(losses: Tensor, mask: Tensor) -> Tensor:
    """Average the token means over rows with a token."""
    counts = mask.sum(1)
    return ((losses * mask).sum(1)[counts > 0] / counts[counts > 0]).mean()


def grpo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return by_rows(surrogate(ratio, a, 0.2, 0.2) + kl * ratio, mask)


def dr_grpo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    ratio = (new - old).exp()
    losses = surrogate(ratio, a, 0.2, 0.2) + kl * ratio
    return (losses * mask).sum() / (mask.shape[1] * mask.any(1).sum())


def dapo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return ((surrogate(ratio, a, 0.2, 0.28) + kl * ratio) * mask).sum() / mask.sum()


def gspo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    mean = ((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
    return by_rows(surrogate(mean.exp(), a, 3e-4, 4e-4) + kl * mean.exp(), mask)


def cispo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return ((-ratio.clamp(max=1.1).detach() * a * new + kl * ratio) * mask).sum() / mask.sum()


def rloo(new: Tensor, old: Tensor, a: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    ratio, rows = ((new - old) * mask).sum(1).exp(), mask.any(1)
    losses = surrogate(ratio, a.amax(1) + a.amin(1), 0.2, 0.2)[rows]
    return losses.mean() + by_rows(kl * ratio[:, None], mask)


@pytest.mark.parametrize("beta", [0.0, 0.3], ids=["no reference", "reference"])
@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (Grpo(variant="grpo"), grpo),
        (Grpo(variant="dr_grpo"), dr_grpo),
        (Grpo(variant="dapo"), dapo),
        (Grpo(variant="gspo"), gspo),
        (Grpo(variant="cispo", clip_high=0.1), cispo),
        (Grpo(variant="rloo"), rloo),
    ],
    ids=lambda value: value.variant if isinstance(value, Grpo) else "",
)
def test_losses_and_gradients_are_the_formulas(loss: Grpo, formula: Callable[..., Tensor], beta: float) -> None:
    """Every variant, with a row without tokens, has its formula's loss and gradients in float64."""
    case, batch = policy_case()
    if not beta:
        batch = batch.evolve(reference=None)
    loss = Grpo(variant=loss.variant, clip_high=loss.clip_high, reference="adapters", beta=beta)
    total, weight, sums = loss.loss(case.hidden, case.head(), batch)
    assert batch.logps is not None and batch.advantages is not None
    new, old, mask = logps_of(case, batch.targets), batch.logps, batch.weights > 0
    excess = torch.zeros_like(new) if batch.reference is None else batch.reference - new
    kl = beta * (excess.exp() - excess - 1) * mask
    expected = formula(new, old, batch.advantages, mask, kl)
    torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=1e-7)
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert float(sums["largest_difference"]) == pytest.approx(float(((new - old) * mask).detach().abs().max()))
    assert ("kl" in sums) == (batch.reference is not None)


@given(_=seeds, temperature=st.sampled_from([None, 0.5]), variant=st.sampled_from(["grpo", "gspo", "cispo"]))
def test_texts_in_trees_have_the_loss_and_gradients_of_separate_rows(
    _: Any, temperature: float | None, variant: Any
) -> None:
    """
    A model's loss, gradients and reference values in float64 equal the separate rows' for every tree.

    Texts share sampled tokens, each with its own advantage and log-probability by text.
    """
    texts = draw_texts(length=24)
    tokens, is_target = texts.tokens, texts.is_target
    context, noise = one_document(*tokens.shape), torch.rand(4, *tokens.shape)
    batch = PolicyBatch(
        tokens,
        tokens.roll(-1, 1).where(is_target, -100),
        context.positions,
        context.document_ids,
        is_target.float(),
        logps=noise[0].where(is_target, 0.0) - 4,
        advantages=(noise[1] - 0.5).where(is_target, 0.0),
        reference=noise[2].double() - 4,
        temperature=None if temperature is None else torch.tensor(temperature),
    )
    loss = Grpo(variant=variant, reference="adapters", beta=0.1)
    packed, separate = (whole(dense(kernels=cpu_kernels(attention=name))).double() for name in ("tree", "eager"))
    separate.load_state_dict(packed.state_dict())
    results = []
    for module, rows in ((packed, batch.evolve(tree=texts.tree)), (separate, batch)):
        total, weight, sums = module(*loss.inputs(rows), partial(_call_with_batch, loss.loss, rows))
        values = module(*loss.inputs(rows), partial(_call_with_batch, loss.reference_values, rows))
        grads = torch.autograd.grad(total, [*module.parameters()])
        results.append((total, weight, sums, values, grads))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def _call_with_batch(function: Callable[..., Any], batch: PolicyBatch, hidden: Tensor, head: Any) -> Any:
    return function(hidden, head, batch)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_weights_the_loss_by_the_ratio_to_the_sampler(variant: Any, correction: Any) -> None:
    """
    Loss and gradient are the formula's at lag 0, with each token's surrogate times TRL's importance sampling ratio.

    The divergence from the reference has no such weight, and the sums have the mean weight and the capped tokens.
    """
    case, batch = policy_case()
    formulas: dict[str, Any] = {"grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "rloo": rloo}
    loss = Grpo(variant=variant, correction=correction, correction_cap=1.5, reference="adapters", beta=0.3)
    total, weight, sums = loss.loss(case.hidden, case.head(), batch)
    assert batch.logps is not None and batch.advantages is not None and batch.reference is not None
    new, mask = logps_of(case, batch.targets), batch.weights > 0
    differences = ((new.detach() - batch.logps) * mask).double()
    logarithms = differences.sum(1, keepdim=True) if "sequence" in correction else differences
    ratio = logarithms.exp().expand_as(differences)
    weights = ratio.clamp(max=1.5) if "truncate" in correction else ratio.masked_fill(ratio > 1.5, 0.0)
    assert bool((ratio > 1.5)[mask].any()) and bool((ratio < 1.5)[mask].any())
    excess = batch.reference - new
    kl = 0.3 * (excess.exp() - excess - 1) * mask
    if variant in ("gspo", "rloo"):  # a row's ratio, with a weight for each of its tokens
        old = new.detach()
        mean = ((new - old) * mask).sum(1, keepdim=True)
        row = (mean / mask.sum(1, keepdim=True).clamp_min(1) if variant == "gspo" else mean).exp()
        expected = by_rows(-row * batch.advantages * weights + kl * row, mask)
    else:
        expected = formulas[variant](new, new.detach(), batch.advantages * weights, mask, kl)
    torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=1e-7)
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    mean_of = (lambda value: value[mask].mean()) if variant == "dapo" else lambda value: by_rows(value, mask)
    for name, value in {"correction": weights, "capped_fraction": (ratio > 1.5).double()}.items():
        assert float(sums[name] / weight) == pytest.approx(float(mean_of(value))), name
    k3 = (differences.exp() - 1 - differences) * mask
    assert float(sums["sampler_kl"] / weight) == pytest.approx(float(mean_of(k3)))
    assert float(sums["ratio"] / weight) == 1.0


def test_a_temperature_divides_the_logits() -> None:
    """At temperature 0.5, loss and reference values equal those for twice the logits."""
    case, batch = policy_case()
    loss, twice = Grpo(reference="adapters", beta=0.1), attrs.evolve(case, weight=2 * case.weight)
    cold = batch.evolve(temperature=torch.tensor(0.5))
    ours, theirs = loss.loss(case.hidden, case.head(), cold), loss.loss(case.hidden, twice.head(), batch)
    torch.testing.assert_close(ours, theirs)
    values = (loss.reference_values(case.hidden, one.head(), rows) for one, rows in ((case, cold), (twice, batch)))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_a_loss_is_the_sum_of_its_microbatches(variant: Any) -> None:
    """One-row microbatches add up to the whole batch's loss, weight and sums; a row without tokens adds 0."""
    case, batch = policy_case()
    loss = Grpo(variant=variant, reference="adapters", beta=0.1)
    whole = loss.loss(case.hidden, case.head(), batch)
    parts = [
        loss.loss(case.hidden[row : row + 1], case.head(), batch.take_rows(slice(row, row + 1))) for row in range(3)
    ]
    for index in (0, 1):
        torch.testing.assert_close(sum(part[index] for part in parts), whole[index])
    for name in ("ratio", "clip_fraction", "kl"):
        torch.testing.assert_close(sum(part[2][name] for part in parts), whole[2][name])
    assert float(parts[2][0].detach()) == float(parts[2][1]) == 0


def test_at_lag_0_the_ratio_is_1_and_the_gradient_that_of_reinforce() -> None:
    """With the policy's own log-probabilities, no ratio is clipped, and each gradient is A dlogp."""
    case, batch = policy_case(drift=0.0)
    mask = batch.weights > 0
    logps = logps_of(case, batch.targets)
    assert batch.advantages is not None
    expected = torch.autograd.grad(-(batch.advantages * logps * mask).sum() / mask.sum(), case.hidden)
    for variant in ("dapo", "cispo"):
        total, weight, sums = Grpo(variant=variant).loss(case.hidden, case.head(), batch)
        assert float(sums["ratio"] / weight) == pytest.approx(1, rel=1e-6) and float(sums["clip_fraction"]) == 0
        torch.testing.assert_close(torch.autograd.grad(total / weight, case.hidden), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("variant", "fraction"), [("grpo", 5 / 12), ("dr_grpo", 5 / 12), ("dapo", 2 / 5), ("cispo", 0.0), ("rloo", 0.0)]
)
def test_clipped_tokens_are_counted_where_the_clip_takes_the_gradient(variant: Any, fraction: float) -> None:
    """A ratio above the clip counts if the advantage is above 0, and one below it if that is below 0."""
    case, batch = policy_case(drift=0.0)
    steps = torch.zeros(3, 5, dtype=torch.float64)
    steps[0, 1:4], steps[1, 3:] = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([1.0, -1.0])
    assert batch.logps is not None
    _, weight, sums = Grpo(variant=variant).loss(case.hidden, case.head(), batch.evolve(logps=batch.logps - steps))
    assert float(sums["clip_fraction"] / weight) == pytest.approx(fraction)


def test_rows_of_a_data_set_are_refused() -> None:
    """Batches without sampled log-probabilities end with the phases that are missing."""
    case, batch = policy_case()
    with pytest.raises(UserError, match="put the phases rollout and advantages first"):
        Grpo().loss(case.hidden, case.head(), batch.evolve(logps=None))


class TrlModel:
    """Stand-in for the policy in TRL's trainers: `_compute_loss` reads its log-probabilities by a method."""

    training = True


@pytest.mark.soak  # importing TRL and its trainers takes 20 s
@pytest.mark.filterwarnings("ignore")  # warnings of TRL and its packages
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_losses_and_gradients_are_those_of_trl(variant: Any, beta: float) -> None:
    """`GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` in TRL 1.16 give our loss and gradients."""
    pytest.importorskip("trl")
    case, batch = policy_case()
    batch = batch.take_rows(slice(0, 2))  # TRL counts rows without tokens
    assert batch.logps is not None and batch.reference is not None
    if variant == "rloo" and beta:
        pytest.skip("TRL has this divergence in the reward")
    correction: Any = "token_truncate" if variant in ("grpo", "dapo") else "none"
    loss = Grpo(variant=variant, reference="adapters" if beta else "none", beta=beta, correction=correction)
    total, weight, _ = loss.loss(case.hidden[:2], case.head(), batch if beta else batch.evolve(reference=None))
    expected = trl_loss(case, batch, variant, beta, correction != "none")
    torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=1e-7)
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def trl_loss(case: Sample, batch: PolicyBatch, variant: str, beta: float, is_corrected: bool) -> Tensor:
    """Call TRL's loss function on a trainer without a model, with our log-probabilities and its correction at 2."""
    trl = import_module("trl")
    mask = (batch.weights > 0).long()
    logps = logps_of(case, torch.cat([batch.targets, torch.zeros(1, 5, dtype=torch.int64)]))[:2]
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}.get(variant, (0.2, 0.2))
    trainer: Any = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = logps, torch.zeros_like(logps), None
    trainer.accelerator.num_processes, trainer.accelerator.gather = 1, lambda value: value
    trainer.accelerator.reduce = lambda value, reduction: value
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold, trainer.args.delta = 1.0, None, None
    trainer.importance_sampling_level = "sequence" if variant == "gspo" else "token"
    trainer.loss_type = "grpo" if variant == "gspo" else variant
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = low, high, beta
    trainer.args.use_bias_correction_kl, trainer.max_completion_length = True, 5
    trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = trainer.use_vllm = False
    inputs = {
        "prompt_ids": torch.zeros(2, 0, dtype=torch.int64),
        "prompt_mask": torch.zeros(2, 0, dtype=torch.int64),
        "completion_ids": batch.targets.clamp_min(0),
        "completion_mask": mask,
        "advantages": ADVANTAGES[:2, 0].double(),
        "old_per_token_logps": batch.logps,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": mask.sum(),
    }
    assert batch.logps is not None
    if is_corrected:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["old_per_token_logps"] = logps.detach()
        inputs["importance_sampling_ratio"] = ((logps.detach() - batch.logps) * mask).exp().clamp(max=2.0)
    inputs["old_logps"] = (batch.logps * mask).sum(1)
    trainer.model.training = True
    cls = trl.RLOOTrainer if variant == "rloo" else trl.GRPOTrainer
    result: Tensor = cls._compute_loss(trainer, TrlModel(), inputs)
    return result
