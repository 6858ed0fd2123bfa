"""Prompts that their completions share in the learning pass."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from drawloom import NodeView, Problem, component
from drawloom.kernels.attention.tree import PrefixGroups
from drawloom.ports import Executor, Mesh, PolicyBatch, Scored, Step, build_meta_module_if_known

MIN_WIDTH_STEP = 16
"""Least difference between two widths of packed rows."""


@runtime_checkable
class MayBeRecurrent(Protocol):
    """A module with or without recurrent layers, whose states can't branch."""

    is_recurrent: bool


@runtime_checkable
class MayBalanceRows(Protocol):
    """A router with a coefficient for a loss that counts a row's tokens."""

    aux_loss_coef: float


@component(reads=("rollouts",), changes=("batches",))
class SharedPrefixes:
    """
    Tree layout for completions: the learning pass computes a prompt once, and not for every completion.

    Losses, gradients and metrics are as with separate rows, except for rounding. A microbatch has a packed row per
    prompt, equally long on all ranks and in all microbatches. Only four widths are used between a power of two and the
    next, because a kernel is compiled for a width.
    """

    executor: Executor
    mesh: Mesh

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report kernels without attention in trees, and a model or a mesh for which a prompt can't be shared."""
        mesh, executor = node.neighbour("mesh"), node.neighbour("executor")
        if mesh and mesh.settings.get("context", 1) != 1:
            text = f"[{node.name}] packs whole rows, but ranks along 'context' divide rows"
            yield mesh.problem("context", text, "write context = 1")
        stages = executor.neighbour("stages") if executor else None
        model = stages.neighbour("model") if stages else None
        if model is None:
            return
        kernels = model.neighbour("kernels")
        if kernels and kernels.settings.get("attention") != "tree":
            text = f"completions would not see the prompt that they share in [{node.name}]"
            yield kernels.problem("attention", text, 'write use = "kernels.auto" and attention = "tree"')
        module = build_meta_module_if_known(model)
        parts = [] if module is None else [*module.modules()]
        if any(isinstance(part, MayBeRecurrent) and part.is_recurrent for part in parts):
            text = f"[{model.name}] has recurrent layers, whose states can't continue in several completions"
            yield node.problem("use", text, f"remove [{node.name}] and its phase, or use a model with attention alone")
        if any(isinstance(part, MayBalanceRows) and part.aux_loss_coef for part in parts):
            text = "the load-balancing loss of a row counts its tokens, and a shared prompt would count once"
            yield model.problem("router_aux_loss_coef", text, "write router_aux_loss_coef = 0.0")

    def run_phase(self, step: Step) -> None:
        """Add a tree to every microbatch."""
        scored: list[Scored] = step.state["rollouts"]
        batches: list[PolicyBatch] = step.state["batches"]
        # The last token of the prompt has another target in each completion.
        groups = [
            PrefixGroups(batch.weights > 0, part.completions.starts - 1, part.group_size)
            for batch, part in zip(batches, scored, strict=True)
        ]
        longest = torch.tensor(max(part.measure_longest_tree() for part in groups))
        self.mesh.data_group.max(longest)
        width = round_width_up(int(longest))
        step.state["batches"] = [
            batch.evolve(tree=part.create_tree(width)) for batch, part in zip(batches, groups, strict=True)
        ]


def round_width_up(tokens: int) -> int:
    """Round `tokens` up to a multiple: a quarter of the next lower power of two."""
    step = max(MIN_WIDTH_STEP, 1 << max(tokens.bit_length() - 3, 0))
    return max(-(-tokens // step) * step, step)
