"""Faults on meshes, seeded into drawloom's own components, for testing `drawloom prove`."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.experts.all_to_all import AllToAllExperts
from drawloom.components.gradients.clip_group_norm import ClipGroupNorm
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.model.decoder.experts import Router
from drawloom.components.model.layers import Linear, LinearHead
from drawloom.components.optim.muon import SharedMatrices, orthogonalize
from drawloom.components.optim.sgd import SGD
from drawloom.components.parallel import context_part
from drawloom.components.parallel.context_part import ContextPart
from drawloom.components.parallel.data_replicate import DataReplicateDimension
from drawloom.components.parallel.ddp import ReplicatedModule
from drawloom.components.parallel.dimension import RankParameters
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.parallel.row_sums import RowSums
from drawloom.components.parallel.tensor import TensorDimension
from drawloom.components.proving.prover import Prover
from drawloom.components.proving.result import ProveResult
from drawloom.components.proving.run import Subject
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.ports import Step, get_or_create_gradient

Fault = Callable[[], AbstractContextManager[object]]


@attrs.frozen
class SeededFault:
    """A fault: what is wrong, axes that a proof may name, the component and words with which it shows, cases to try."""

    name: str
    text: str
    axes: tuple[str, ...]
    context: Fault
    use: str = "loss.next_token"
    words: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """Return a context for replacing a method by the result of `make`."""
    return partial(_replace, owner, name, make)


@contextmanager
def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def _skip_names(pattern: str, original: Any) -> Any:
    """Return a replacement for `sum_named_gradients_over_group` without some parameters."""

    def sum_others(self: RankParameters, names: Any, group: Any) -> None:
        original(self, [name for name in names if pattern not in name], group)

    return sum_others


def _make_nothing(_original: Any) -> Any:
    return lambda self, parameters: None


def _make_empty_set(_original: Any) -> Any:
    return lambda self, parameters: frozenset()


def _double_experts(original: Any) -> Any:
    def sum_twice(self: ExpertDimension, parameters: RankParameters) -> None:
        original(self, parameters)
        if self.mesh.sizes.expert > 1:
            for name in parameters.experts & parameters.trained.keys():
                parameters.get_gradient_or_zeros(name).mul_(2)

    return sum_twice


def _scale_one_norm_in_bfloat16(original: Any) -> Any:
    """Scale by less than four times the largest rounding error of this norm's gradient in another layer."""

    def sum_and_scale(self: Synchronize, step: Step) -> None:
        original(self, step)
        for name, parameter in self.parameters.named_parameters():
            if "layers.0.input_layernorm" in name and self.mesh.sizes.context > 1 and parameter.dtype == torch.float32:
                get_or_create_gradient(parameter).mul_(1.06)

    return sum_and_scale


def _load_on_first_rank(original: Any) -> Any:
    def load(self: SGD, state: dict[str, Any]) -> None:
        if self.mesh.indices.data_shard == 0:
            original(self, state)

    return load


def _use_local_mean(_original: Any) -> Any:
    def mean_logits(self: LinearHead, hidden: Tensor) -> Tensor:
        row = self.weight.sum(0) / len(self.weight)
        return self.ranks.copy_to_ranks(hidden) @ row

    return mean_logits


def _add_log_of_size(original: Any) -> Any:
    def token_losses(self: LinearHead, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> Any:
        losses, lse = original(self, hidden, targets, weights)
        shift = torch.tensor(float(self.ranks.size)).log()
        return losses + (shift if weights is None else shift * weights), lse

    return token_losses


def _return_own_part(_original: Any) -> Any:
    return lambda self, part: torch.cat([part] * self.group.size, 1)


def _keep_rank_order(original: Any) -> Any:
    return lambda self, others=False: sorted(original(self, others))


def _keep_own_gradient(_original: Any) -> Any:
    return staticmethod(lambda ctx, grad: (grad[:, list(ctx.part.piece_indices)], None))


def _drop_last_token(original: Any) -> Any:
    def select(self: ContextPart, batch: Any) -> Any:
        own = original(self, batch)
        if self.group.size > 1 and self.group.rank:
            weights = own.weights.clone()
            weights[:, -1] = 0
            return own.evolve(weights=weights)
        return own

    return select


def _add_bias_on_every_rank(_original: Any) -> Any:
    return lambda self, x: self.multiply_by_weight(x, self.bias)


def _keep_local_norm(_original: Any) -> Any:
    return lambda self, value: value.clone()


def _orthogonalize_slices(_original: Any) -> Any:
    def orthogonalize_own(self: SharedMatrices, updates: Mapping[str, Tensor], ns_steps: int) -> dict[str, Tensor]:
        return {
            name: orthogonalize(update.bfloat16(), ns_steps) for name, update in updates.items() if update.numel()
        } | {name: update.bfloat16() for name, update in updates.items() if not update.numel()}

    return orthogonalize_own


def _count_local_rows(original: Any) -> Any:
    def sum_own(self: RowSums, weights: Tensor) -> Tensor:
        return weights.sum(1, dtype=torch.float64)

    return sum_own


def _ignore_padding_of_split_tokens(original: Any) -> Any:
    def forward(self: Router, hidden: Tensor, weights: Any = None, padding: Any = None) -> Any:
        return original(self, hidden, weights, None if self.ranks.size > 1 else padding)

    return forward


def _send_without_probability_gradient(original: Any) -> Any:
    def exchange(self: AllToAllExperts, hidden: Tensor, probabilities: Tensor, routes: Any) -> Any:
        return original(self, hidden, probabilities.detach(), routes)

    return exchange


def _keep_local_sums(_original: Any) -> Any:
    def send(self: ReplicatedModule) -> None:
        self._reduces = False
        self._unsent.clear()

    return send


def _count_whole_rows(original: Any) -> Any:
    def sum_counts(self: Synchronize, state: Any) -> Tensor:
        sums: Tensor = original(self, state)
        return torch.cat([sums[:2], sums[2:] * self.mesh.sizes.context])

    return sum_counts


def _weight_by_context(original: Any) -> Any:
    """Divide by the local weight, as a mean over a microbatch does."""

    def sum_means(self: Synchronize, state: Any) -> Tensor:
        sums: Tensor = original(self, state)
        return torch.cat([sums[:1], sums[1:2] / self.mesh.data_group.size, sums[2:]])

    return sum_means


def _clip_by_own_norm(original: Any) -> Any:
    def compute(self: ClipGroupNorm) -> Tensor:
        kept, self.reduce = self.reduce, type("Own", (), {"sum_over_ranks": lambda _, value: value.clone()})()
        try:
            norm: Tensor = original(self)
            return norm
        finally:
            self.reduce = kept

    return compute


def _load_layers_by_local_number(original: Any) -> Any:
    def load(self: MaterializedStages, state: dict[str, Any]) -> None:
        first = self.local[0].span.first
        names = [name for name in state if ".layers." in name] if first else []
        shifted = dict(state)
        for name in names:
            head, _, rest = name.partition(".layers.")
            number, _, leaf = rest.partition(".")
            source = f"{head}.layers.{int(number) - 1}.{leaf}"
            if source in state and state[source].shape == state[name].shape:
                shifted[name] = state[source]
        original(self, shifted)

    return load


MEASURED: dict[str, float] = {}
"""State outside of any node, as in a component's class or module."""


def _measure_in_first_step(original: Any) -> Any:
    def run_phase(self: ClipGroupNorm, step: Step) -> None:
        if step.index == 1:
            MEASURED["factor"] = 0.5
        original(self, step)
        for _, parameter in self.parameters.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(MEASURED.get("factor", 1.0))

    return run_phase


TIED = ("model.tie_word_embeddings=true",)
FAULTS = [
    SeededFault(
        "norm_gradients",
        "gradients of norms are not summed",
        ("tensor",),
        replace(TensorDimension, "sum_remaining_gradients", _make_nothing),
    ),
    SeededFault(
        "norm_in_bfloat16",
        "in bfloat16, the gradient of one layer's norm is 6 % too large",
        ("context = 2, bfloat16",),
        replace(Synchronize, "run_phase", _scale_one_norm_in_bfloat16),
        cases=("context = 2, bfloat16",),
    ),
    SeededFault(
        "state_of_second_rank",
        "the second rank does not load its momentum",
        ("data_shard = 2, killed and resumed",),
        replace(SGD, "load_state_dict", _load_on_first_rank),
        cases=("data_shard = 2, killed and resumed",),
    ),
    SeededFault(
        "delta_norm",
        "the gradient of a delta net's output norm is not summed",
        ("tensor",),
        replace(RankParameters, "sum_named_gradients_over_group", partial(_skip_names, "linear_attn.norm")),
        "model.qwen3_5",
    ),
    SeededFault(
        "latent_rows",
        "the rows of a latent projection are not summed",
        ("tensor",),
        replace(RankParameters, "sum_named_gradients_over_group", partial(_skip_names, "kv_a_proj")),
        "model.deepseek_v3",
    ),
    SeededFault(
        "local_smoothing",
        "label smoothing over the local vocabulary",
        ("tensor",),
        replace(LinearHead, "mean_logits", _use_local_mean),
        words=("loss.label_smoothing=0.1",),
    ),
    SeededFault(
        "gathered_twice",
        "the log of the rank count is added to losses",
        ("tensor",),
        replace(LinearHead, "token_losses", _add_log_of_size),
    ),
    SeededFault(
        "bias_everywhere",
        "every rank adds the bias of a rowwise layer",
        ("tensor",),
        replace(Linear, "forward", _add_bias_on_every_rank),
        "model.gpt_oss",
    ),
    SeededFault(
        "norm_counts_copies",
        "the norm counts copies",
        ("tensor",),
        replace(TensorDimension, "list_copies_owned_elsewhere", _make_empty_set),
    ),
    SeededFault(
        "padding_in_router",
        "a router counts padding if tokens are split",
        ("tensor",),
        replace(Router, "forward", _ignore_padding_of_split_tokens),
    ),
    SeededFault(
        "muon_on_slices",
        "Newton-Schulz on a slice",
        ("tensor", "context", "data_shard"),
        replace(SharedMatrices, "orthogonalize_slices", _orthogonalize_slices),
        "optim.muon",
    ),
    SeededFault(
        "no_exchange",
        "attention sees only this rank's keys",
        ("context",),
        replace(ContextPart, "gather", _return_own_part),
    ),
    SeededFault(
        "rank_order",
        "gathered keys stay in the order of ranks",
        ("context",),
        replace(ContextPart, "list_piece_owners", _keep_rank_order),
    ),
    SeededFault(
        "no_remote_gradient",
        "gradients of other ranks' keys are dropped",
        ("context",),
        replace(context_part._Gather, "backward", _keep_own_gradient),
    ),
    SeededFault(
        "dropped_token",
        "a token at the end of a part is dropped",
        ("context",),
        replace(ContextPart, "select_own_tokens", _drop_last_token),
    ),
    SeededFault(
        "row_weights",
        "the weights of rows are not summed over parts",
        ("context",),
        replace(RowSums, "sum_row_weights", _count_local_rows),
    ),
    SeededFault(
        "whole_rows_counted",
        "every part counts whole rows",
        ("context",),
        replace(Synchronize, "_sum_losses_over_ranks", _count_whole_rows),
    ),
    SeededFault(
        "tied_copies",
        "gradients of a tied embedding's copies are not summed",
        ("pipeline",),
        replace(PipelineDimension, "sum_remaining_gradients", _make_nothing),
        words=TIED,
    ),
    SeededFault(
        "norm_of_a_stage",
        "the norm leaves the other ranks out",
        ("pipeline", "tensor", "context", "data_shard"),
        replace(SumOverParameters, "sum_over_ranks", _keep_local_norm),
    ),
    SeededFault(
        "clip_by_own_norm",
        "every rank clips by the norm of its own parameters",
        ("pipeline", "tensor", "context", "data_shard"),
        replace(ClipGroupNorm, "_compute_norm_over_ranks", _clip_by_own_norm),
        "gradients.clip_group_norm",
    ),
    SeededFault(
        "local_layer_numbers",
        "layer numbers of a checkpoint are local to a stage",
        ("pipeline", "checkpoint"),
        replace(MaterializedStages, "load_state_dict", _load_layers_by_local_number),
    ),
    SeededFault(
        "state_in_a_global",
        "a number measured in the first step is in no state",
        ("resumed",),
        replace(ClipGroupNorm, "run_phase", _measure_in_first_step),
        "gradients.clip_group_norm",
    ),
    SeededFault(
        "mean_of_means",
        "the weight is averaged over ranks",
        ("context", "data_shard", "data_replicate"),
        replace(Synchronize, "_sum_losses_over_ranks", _weight_by_context),
    ),
    SeededFault(
        "no_replica_sum",
        "replicas do not sum gradients",
        ("data_replicate",),
        replace(ReplicatedModule, "finish_reduction", _keep_local_sums),
    ),
    SeededFault(
        "unsummed_outside",
        "gradients outside of the backward pass are not summed",
        ("data_replicate",),
        replace(DataReplicateDimension, "sum_remaining_gradients", _make_nothing),
        "loss.next_token",
        TIED,
    ),
    SeededFault(
        "experts_twice",
        "gradients of experts are doubled",
        ("expert",),
        replace(ExpertDimension, "sum_remaining_gradients", _double_experts),
    ),
    SeededFault(
        "unsummed_experts",
        "gradients of experts are not summed",
        ("expert", "tensor", "data_replicate"),
        replace(ExpertDimension, "sum_remaining_gradients", _make_nothing),
    ),
    SeededFault(
        "router_gradient",
        "the router's gradient covers no sent token",
        ("expert",),
        replace(AllToAllExperts, "_exchange_tokens_and_probabilities", _send_without_probability_gradient),
    ),
]


def prove_with(fault: SeededFault, prover: Prover) -> ProveResult:
    """Prove with a fault."""
    return prover.prove(Subject(fault.use, fault.words), None, fault.cases, fault.context)


def main() -> None:
    """Print the table for docs/proving.md."""
    print("| fault | found with | first difference | named cause |\n|---|---|---|---|")
    with Prover() as prover:
        for fault in FAULTS:
            result = prove_with(fault, prover)
            difference = result.difference
            assert difference is not None, f"{fault.name} is not found: {result.render('text')}"
            cause = re.split(r"[:(;]| on all ranks", difference.cause)[0].strip()
            where = f"{difference.name}, [{difference.phase}]"
            print(f"| {fault.text} | {result.failed} | {where} | {cause} |", flush=True)


if __name__ == "__main__":
    main()
