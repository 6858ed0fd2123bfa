"""
Losses for sampled completions: GRPO and its relatives.

A token's surrogate is -min(ratio * A, clip(ratio) * A), with the advantage A and the ratio of the token's probability
to the probability that it was sampled with (Schulman et al. 2017, "Proximal Policy Optimization", arXiv 1707.06347,
equation 7).

- `grpo`: Shao et al. 2024, arXiv 2402.03300, equation 3: the mean over rows of the means over tokens.
- `dr_grpo`: Liu et al. 2025, arXiv 2503.20783: the sum over tokens, divided by a constant length and the rows.
- `dapo`: Yu et al. 2025, arXiv 2503.14476: the mean over all tokens of the step, and a higher upper clip.
- `gspo`: Zheng et al. 2025, arXiv 2507.18071: the ratio of a row, the geometric mean over its tokens.
- `cispo`: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585: the clipped ratio is a factor without a gradient.
- `rloo`: Ahmadian et al. 2024, arXiv 2402.14740: the ratio of a row, the product over its tokens.

A correction for another sampler, or an older policy, weights the surrogate of the current policy by the ratio of both,
without a gradient: truncated (Espeholt et al. 2018, "IMPALA", arXiv 1802.01561, section 4.1; Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"), or 0 above the cap (masked; Liu et al. 2025, "When
Speed Kills Stability"), by token or by row.
"""

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import attrs
import torch
from torch import Tensor

from drawloom import NodeView, Problem, UserError, at_least, component, setting
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.ports import Head, LossSums, PolicyBatch, TokenContext, compute_policy_logps

Mean = Literal["rows", "tokens", "constant"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@attrs.frozen
class Variant:
    """
    GRPO variant: which tokens share a probability ratio, its clip range around 1, and how token losses are averaged.

    With `detached`, the clipped ratio is a constant factor for the log-probability, without a gradient (CISPO).
    """

    mean: Mean
    clip_low: float
    clip_high: float
    ratio: Literal["token", "row_mean", "row_sum"] = "token"
    detached: bool = False


VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant("rows", 0.2, 0.2),
    "dr_grpo": Variant("constant", 0.2, 0.2),
    "dapo": Variant("tokens", 0.2, 0.28),
    "gspo": Variant("rows", 3e-4, 4e-4, ratio="row_mean"),
    "cispo": Variant("tokens", math.inf, 4.0, detached=True),
    "rloo": Variant("rows", 0.2, 0.2, ratio="row_sum"),
}


@component
class Grpo(DecoderInputs):
    """
    Policy-gradient loss of sampled completions: GRPO, Dr. GRPO, DAPO, GSPO, CISPO or RLOO.

    The variants differ in the ratio, its clip and the mean; the phase `phases.advantages` chooses the baseline. Only
    rows with a token to learn count in a mean, over all microbatches and ranks. The constant of `dr_grpo` is the row's
    length. With a reference, each token's loss has `beta` times an estimate of the KL divergence to it: k3 of Schulman,
    times the ratio, which corrects for samples of an older policy (as in DeepSeek-V3.2 and TRL).

    With a `correction` the ratio is to the current policy, and so 1, and nothing is clipped; the probability ratio to
    the sampler is a weight of every token, up to `correction_cap`.

    Named sums are `ratio` and `clip_fraction`, by the loss's mean (by rows for a constant), and with a reference `kl`.
    `sampler_kl` estimates the divergence of the sampler from the policy (k3), and with a correction `correction` is its
    mean weight, and `capped_fraction` is the part of the tokens above the cap.
    `largest_difference` is the largest distance between a token's log-probability and the sampled one in a microbatch:
    0 at the first step after exact rollouts, and from then on the policy's change.
    """

    batch_leaves: ClassVar[tuple[str, ...]] = (*DecoderInputs.batch_leaves, "logps", "advantages")

    variant: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"] = setting(
        "method, which sets the defaults of the clip and the mean", default="grpo"
    )
    clip_low: float | None = setting(
        "the ratio is clipped at 1 - clip_low; default: the variant's", default=None, check=at_least(0)
    )
    clip_high: float | None = setting(
        "the ratio is clipped at 1 + clip_high; default: the variant's", default=None, check=at_least(0)
    )
    mean: Mean | None = setting(
        "mean over tokens, over rows of means over tokens, or of sums by a constant length; default: the variant's",
        default=None,
    )
    reference: Literal["none", "adapters", "model"] = setting(
        "reference model of the KL divergence: none, this model without adapters, or the recipe's frozen model",
        default="none",
    )
    beta: float = setting("coefficient of the KL divergence to the reference", default=0.0, check=at_least(0))
    correction: Correction = setting(
        "weight for the probability ratio to the sampler, by token or by sequence: cut at the cap, or 0 above it",
        default="none",
    )
    correction_cap: float = setting("largest ratio to the sampler", default=2.0, check=at_least(1))

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a coefficient without a reference, a reference without a coefficient, and settings without effect."""
        beta, reference = node.settings["beta"], node.settings["reference"]
        if beta and reference == "none":
            yield node.problem("beta", "there is no reference to diverge from", 'write reference = "adapters"')
        if reference != "none" and not beta:
            yield node.problem("reference", "the reference has no effect with beta = 0", "write beta = 0.04")
        if node.settings["correction"] == "none" and node.settings["correction_cap"] != 2.0:
            text = "the cap has no effect without a correction"
            yield node.problem("correction_cap", text, 'write correction = "token_truncate"')
        if node.settings["correction"] != "none" and VARIANTS[node.settings["variant"]].detached:
            text = f"{node.settings['variant']} weights tokens by the ratio itself, up to 1 + clip_high"
            yield node.problem("correction", text, 'write correction = "none"')
        if VARIANTS[node.settings["variant"]].detached and node.settings["clip_low"] is not None:
            text = f"{node.settings['variant']} clips ratios above 1 only"
            yield node.problem("clip_low", text, "leave it out; clip_high = 4.0 clips at 5")

    @property
    def variant_with_settings(self) -> Variant:
        """Return the variant with this loss's own settings."""
        given = {name: getattr(self, name) for name in ("clip_low", "clip_high", "mean")}
        return attrs.evolve(
            VARIANTS[self.variant], **{name: value for name, value in given.items() if value is not None}
        )

    def inputs(self, batch: PolicyBatch) -> tuple[Tensor, TokenContext]:  # type: ignore[override]
        if (tree := batch.tree) is None:
            return super().inputs(batch)
        weights = tree.pack(batch.weights).masked_fill(tree.padding, 0.0)
        context = TokenContext(tree.pack(batch.positions), tree.document_ids, weights, padding=tree.padding)
        return tree.pack(batch.tokens), context

    def reference_values(self, hidden: Tensor, head: Head, batch: PolicyBatch) -> Tensor:
        return _compute_logps_by_row(hidden, head, batch)

    def with_reference(self, batch: PolicyBatch, values: Tensor) -> PolicyBatch:
        return batch.evolve(reference=values)

    def loss(self, hidden: Tensor, head: Head, batch: PolicyBatch) -> LossSums:
        """Return the loss sum, the weight sum, and named sums; hidden is (rows, length, hidden_size)."""
        if batch.logps is None or batch.advantages is None:
            raise UserError("the batches have no sampled completions; put the phases rollout and advantages first", 2)
        method = self.variant_with_settings
        is_target = batch.weights > 0
        logps = _compute_logps_by_row(hidden, head, batch)
        differences = (logps - batch.logps).where(is_target, 0.0)
        counts = is_target.sum(1, keepdim=True).clamp_min(1)
        drift = differences.detach()  # of the policy from the sampler
        if self.correction != "none":
            differences = differences - drift
        ratios = _compute_probability_ratios(differences, counts, method)
        low, high = 1 - method.clip_low, 1 + method.clip_high
        advantages, clipped = batch.advantages, ratios.clamp(low, high)
        if method.detached:
            losses = -clipped.detach() * advantages * logps
        else:
            losses = -torch.minimum(ratios * advantages, clipped * advantages)
        if self.correction != "none":
            correction, is_capped = self._compute_correction(drift)
            losses = losses * correction
        if batch.reference is not None:
            excess = (batch.reference - logps).where(is_target, 0.0)
            kl = excess.exp() - excess - 1
            losses = losses + self.beta * kl * ratios
        token_weights = batch.weights.to(losses.dtype)
        shares = token_weights if method.mean == "tokens" else token_weights / counts
        weights = token_weights / losses.shape[1] if method.mean == "constant" else shares
        is_clipped = ((ratios < low) & (advantages < 0)) | ((ratios > high) & (advantages > 0))
        with torch.no_grad():
            sums = {
                "ratio": (ratios * shares).double().sum(),
                "clip_fraction": (is_clipped * shares).double().sum(),
                "largest_difference": drift.abs().max().double(),
                "sampler_kl": ((drift.expm1() - drift) * shares).double().sum(),
            }
            if self.correction != "none":
                sums["correction"] = (correction * shares).double().sum()
                sums["capped_fraction"] = (is_capped * shares).double().sum()
            if batch.reference is not None:
                sums["kl"] = (kl * shares).double().sum()
        return (losses * weights).sum(), shares.double().sum(), sums

    def _compute_correction(self, drift: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights for the sampler, and whether the ratio is above the cap: (rows, length), as drift is."""
        level, action = self.correction.split("_")
        logarithms = drift if level == "token" else drift.double().sum(1, keepdim=True).expand_as(drift)
        ratios = logarithms.exp().to(drift.dtype)
        is_capped = ratios > self.correction_cap
        cut = ratios.clamp_max(self.correction_cap)
        return cut if action == "truncate" else cut.masked_fill(is_capped, 0.0), is_capped


def _compute_logps_by_row(hidden: Tensor, head: Head, batch: PolicyBatch) -> Tensor:
    """Return the targets' log-probabilities, (rows, length), from hidden states of the rows or of their trees."""
    is_target, tree = batch.weights > 0, batch.tree
    if tree is None:
        return compute_policy_logps(hidden, head, batch.targets, is_target, batch.temperature)
    trained = tree.pack_trained(batch.targets), tree.pack_trained(is_target)
    logps = compute_policy_logps(tree.select_trained(hidden), head, *trained, batch.temperature)
    return tree.unpack_trained(logps, is_target)  # type: ignore[no-any-return]


def _compute_probability_ratios(differences: Tensor, counts: Tensor, method: Variant) -> Tensor:
    """Return probability ratios (rows, length) from log-probability differences: by token, or one for the whole row."""
    if method.ratio == "token":
        return differences.exp()
    logarithms = differences.double().sum(1, keepdim=True)
    if method.ratio == "row_mean":
        logarithms = logarithms / counts
    return logarithms.exp().to(differences.dtype).expand_as(differences)
