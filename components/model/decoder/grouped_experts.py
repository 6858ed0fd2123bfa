"""Config for DeepSeek's experts: groups, a balancing bias, and shared experts (arXiv 2412.19437)."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import MoeConfig, create_size_check, find_dense_width_faults
from drawloom.components.model.decoder.rope import InvalidSetting
from drawloom.components.model.decoder.specs import Routing
from drawloom.graph import above, at_least, setting


@attrs.frozen(kw_only=True, slots=False)
class GroupedExpertsConfig(MoeConfig):
    """Config for routed experts in groups and shared experts in all layers but the first."""

    n_shared_experts: int = setting(
        default=1,
        check=create_size_check("num_experts"),
        doc="number of shared experts per layer, which process all tokens",
    )
    first_k_dense_replace: int = setting(default=0, check=at_least(0), doc="number of first layers without experts")
    routed_scaling_factor: float = setting(
        default=1.0, check=above(0), impact="changes_training", doc="multiplier of the scores of a token's experts"
    )
    n_group: int = setting(default=1, check=at_least(1), impact="changes_training", doc="number of expert groups")
    topk_group: int = setting(
        default=1, check=at_least(1), impact="changes_training", doc="maximum number of expert groups per token"
    )

    @property
    def shared_expert_width(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    def layer_has_experts(self, number: int) -> bool:
        return number >= self.first_k_dense_replace

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the faults in expert groups, and the fault if no layer has experts."""
        yield from super().find_faults(given)
        layers, dense = given["num_hidden_layers"], given["first_k_dense_replace"]
        if dense >= layers:
            why = f"first_k_dense_replace = {dense} leaves none of {layers} layers with experts"
            yield InvalidSetting("first_k_dense_replace", why, f"write less than {layers}")
        yield from find_dense_width_faults(given, range(dense))
        yield from _find_expert_group_faults(given)


@attrs.frozen(kw_only=True, slots=False)
class SigmoidExpertsConfig(GroupedExpertsConfig):
    """Config for DeepSeek-V3's experts: scores are sigmoids, and a bias added to them balances the load."""

    norm_topk_prob: bool = setting(
        default=True,
        impact="changes_training",
        doc="normalise the scores of a token's experts to a sum of 1",
    )
    router_aux_loss_coef: float = 0.0  # the router's bias balances

    @property
    def routing(self) -> Routing:
        """Routing by sigmoid scores, with float32 logits and a balancing bias."""
        return Routing(
            scoring_func="sigmoid",
            bias=True,
            norm_topk_prob=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
            n_group=self.n_group,
            topk_group=self.topk_group,
            wide_logits=True,
        )


def _find_expert_group_faults(given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
    """Yield the fault if groups do not divide the experts, or allow fewer experts than a token chooses."""
    experts, choices = given["num_experts"], given["num_experts_per_tok"]
    groups, used = given["n_group"], given["topk_group"]
    if experts % groups or (groups > 1 and experts // groups < 2):
        fitting = [number for number in range(1, experts // 2 + 1) if experts % number == 0] or [1]
        why = f"n_group = {groups} does not divide num_experts = {experts} into groups of 2 or more"
        yield InvalidSetting("n_group", why, f"write one of {', '.join(map(str, fitting))}")
    elif used > groups:
        yield InvalidSetting("topk_group", f"topk_group = {used} is more than n_group = {groups}", f"write {groups}")
    elif choices > used * (experts // groups) and choices <= experts:
        allowed = f"topk_group = {used} allows {used * experts // groups} experts"
        why = f"{allowed}, fewer than num_experts_per_tok = {choices}"
        yield InvalidSetting("topk_group", why, f"write {-(-choices * groups // experts)}, or more")


RENAMED = {"num_experts": "n_routed_experts"}
"""Keys that have other names in a `config.json`."""
