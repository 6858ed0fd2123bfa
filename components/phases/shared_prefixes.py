"""Prompts that their completions share in the learning pass."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from drawloom import NodeView, Problem, component
from drawloom.kernels.attention.tree import create_prefix_tree, measure_longest_tree
from drawloom.ports import Executor, Mesh, PolicyBatch, Scored, Step, build_meta_module_if_known

MIN_WIDTH_STEP = 16
"""Least difference between two widths of packed rows."""


@runtime_checkable
class MayBeRecurrent(Protocol):
    """A module that tells whether it has recurrent layers, whose states can't branch."""

    is_recurrent: bool


@runtime_checkable
class MayBalanceRows(Protocol):
    """A router with the coefficient of a loss that counts the tokens of a row."""

    aux_loss_coef: float


@component(reads=("rollouts",), changes=("batches",))
class SharedPrefixes:
    """
    Layout of a prompt's completions as a tree: the learning pass computes the prompt once, and not for each of them.

    Losses, gradients and metrics are those of separate rows, except for rounding. A microbatch has a packed row for
    every prompt; all ranks and microbatches of a step have equally long ones. Only four widths are used between a power
    of two and the next, since compiled kernels are made for each of them.
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
        layouts = [
            (batch.weights > 0, part.completions.starts - 1, part.group_size)
            for batch, part in zip(batches, scored, strict=True)
        ]
        longest = torch.tensor(max(measure_longest_tree(*layout) for layout in layouts))
        self.mesh.data_group.max(longest)
        width = round_width_up(int(longest))
        step.state["batches"] = [
            batch.evolve(tree=create_prefix_tree(*layout, width))
            for batch, layout in zip(batches, layouts, strict=True)
        ]


def round_width_up(tokens: int) -> int:
    """Return the next multiple of a quarter of the greatest power of two that is not above `tokens`."""
    step = max(MIN_WIDTH_STEP, 1 << max(tokens.bit_length() - 3, 0))
    return max(-(-tokens // step) * step, step)
