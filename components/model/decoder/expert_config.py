"""Configs for decoders with experts."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from drawloom import above, at_least, setting
from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.config import DecoderConfig, Pairs, size_setting, training_setting
from drawloom.components.model.decoder.rope import InvalidSetting
from drawloom.components.model.decoder.specs import PartSpec
from drawloom.ports import Settings

MIXTRAL_EXPERTS = {
    r"\.mlp\.(gate|shared_experts|experts)\.": r".block_sparse_moe.\1.",
    r"(\.experts\.\d+)\.gate_proj\.": r"\1.w1.",
    r"(\.experts\.\d+)\.up_proj\.": r"\1.w3.",
    r"(\.experts\.\d+)\.down_proj\.": r"\1.w2.",
}
"""Patterns for files in which experts have Mixtral's names."""

MAX_EXPERTS_IN_ALL = 1_000_000
"""Experts of all layers: each is a tensor of its own in files."""


class ExpertsConfig(DecoderConfig):
    """
    Config for a decoder with experts. A family decides which layers have experts, and how they are chosen.

    Keys, class variables and properties called like fields of `ExpertSpec` are the experts' specification.
    `router_aux_loss_coef` and `router_z_loss_coef` are loss coefficients in training; both losses are means over
    layers.
    """

    maxima: ClassVar[Pairs] = (("num_experts_per_tok", "num_experts"),)

    intermediate_size: int = size_setting("intermediate_size", "inner width of an expert")
    num_experts: int = size_setting("num_experts", "number of routed experts per layer")
    num_experts_per_tok: int = size_setting("num_experts", "number of routed experts per token")
    router_aux_loss_coef: float = training_setting(
        "load-balancing loss coefficient", default=0.001, check=at_least(0)
    )  # the default of transformers' MoeConfig
    router_z_loss_coef: float = training_setting(
        "router z-loss coefficient, to keep the router's logits small", default=0.0, check=at_least(0)
    )

    @property
    def expert_width(self) -> int:
        """The inner width of an expert."""
        return self.intermediate_size

    @property
    def expert_spec(self) -> ExpertSpec:
        """The specification for the experts of a layer."""
        return ExpertSpec.from_config(
            self,
            width=self.expert_width,
            aux_loss_coef=self.router_aux_loss_coef / self.moe_layers,
            z_loss_coef=self.router_z_loss_coef / self.moe_layers,
        )

    def mlp_spec_of(self, layer: int) -> PartSpec:
        return self.expert_spec if self.layer_has_experts(layer) else super().mlp_spec_of(layer)

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """Yield the fault if there are more experts than files can contain."""
        yield from super().find_faults(given)
        if (total := given["num_hidden_layers"] * given["num_experts"]) > MAX_EXPERTS_IN_ALL:
            why = f"num_hidden_layers × num_experts = {total} experts are more than {MAX_EXPERTS_IN_ALL}"
            yield InvalidSetting("num_experts", why, "write fewer")

    def layer_has_experts(self, number: int) -> bool:
        """Return True: all layers have experts, unless a subclass overrides this."""
        return True

    @property
    def moe_layers(self) -> int:
        """The number of layers with experts."""
        return sum(map(self.layer_has_experts, range(self.num_hidden_layers)))


class MoeConfig(ExpertsConfig):
    """Config for a decoder whose experts have another width than the feed-forward networks."""

    intermediate_size: int = size_setting(
        "intermediate_size", "inner width of the feed-forward network in layers without experts"
    )
    moe_intermediate_size: int = size_setting("intermediate_size", "inner width of an expert")

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size


def find_dense_width_faults(given: Settings, dense: Sequence[int]) -> Iterator[InvalidSetting]:
    """Yield the fault if intermediate_size is missing although the layers `dense` have no experts."""
    if dense and "intermediate_size" not in given:
        why = f"intermediate_size is missing, and layer {dense[0]} has no experts"
        yield InvalidSetting("intermediate_size", why, "write intermediate_size = 768, for example")


class GroupedExpertsConfig(MoeConfig):
    """Config for routed experts in groups and shared experts in all layers but the first."""

    renamed = {"num_experts": "n_routed_experts"}
    wide_logits = True
    maxima = (*MoeConfig.maxima, ("topk_group", "n_group"))

    n_shared_experts: int = size_setting(
        "num_experts", "number of shared experts per layer, which process all tokens", default=1
    )
    first_k_dense_replace: int = setting("number of first layers without experts", default=0, check=at_least(0))
    routed_scaling_factor: float = training_setting(
        "multiplier of the scores of a token's experts", default=1.0, check=above(0)
    )
    n_group: int = training_setting("number of expert groups", default=1, check=at_least(1))
    topk_group: int = training_setting("maximum number of expert groups per token", default=1, check=at_least(1))

    @property
    def shared_expert_width(self) -> int:
        """The inner width for experts that all tokens visit."""
        return self.n_shared_experts * self.moe_intermediate_size

    def layer_has_experts(self, number: int) -> bool:
        return number >= self.first_k_dense_replace

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """Yield the faults in expert groups, and the fault if no layer has experts."""
        yield from super().find_faults(given)
        layers, dense = given["num_hidden_layers"], given.get("first_k_dense_replace", 0)
        if dense >= layers:
            why = f"first_k_dense_replace = {dense} leaves none of {layers} layers with experts"
            yield InvalidSetting("first_k_dense_replace", why, f"write less than {layers}")
        yield from find_dense_width_faults(given, range(dense))
        experts, choices = given["num_experts"], given["num_experts_per_tok"]
        groups, used = given["n_group"], given["topk_group"]
        if experts % groups or (groups > 1 and experts // groups < 2):
            fitting = [number for number in range(1, experts // 2 + 1) if experts % number == 0] or [1]
            why = f"n_group = {groups} does not divide num_experts = {experts} into groups of 2 or more"
            yield InvalidSetting("n_group", why, f"write one of {', '.join(map(str, fitting))}")
        elif choices > used * (experts // groups) and choices <= experts:
            allowed = f"topk_group = {used} allows {used * experts // groups} experts"
            why = f"{allowed}, fewer than num_experts_per_tok = {choices}"
            yield InvalidSetting("topk_group", why, f"write {-(-choices * groups // experts)}, or more")


class SigmoidExpertsConfig(GroupedExpertsConfig):
    """Config for DeepSeek-V3's experts: scores are sigmoids, and a bias added to them balances the load."""

    scoring_func = "sigmoid"
    balancing_bias = True

    norm_topk_prob: bool = training_setting("normalise the scores of a token's experts to a sum of 1", default=True)
    router_aux_loss_coef: float = 0.0  # the router's bias balances

    @property
    def unread_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        count = self.num_hidden_layers
        return tuple(f"model.layers.{layer}.*" for layer in range(count, count + 16))  # for multi-token prediction
