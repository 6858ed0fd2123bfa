"""Beginnings shared by completions in the learning pass."""

from collections.abc import Iterator

import torch

from drawloom import NodeView, Problem, component
from drawloom.components.state.prefix_tree import PrefixGroups, round_width_up
from drawloom.ports import Executor, Mesh, PolicyBatch, Scored, Step, find_sharing_problems


@component(reads=("rollouts",), changes=("batches",))
class SharedPrefixes:
    """
    Tree layout for completions: the learning pass computes a prompt, and turns shared by several completions, once.

    Completions share the tokens up to the first other id, or other route from a server; each has its own sampled
    log-probabilities and advantage for them. Losses, gradients and metrics are as with separate rows, except for
    rounding. A microbatch has a packed row per prompt, equally long on all ranks and in all microbatches. Only four
    widths are used between a power of two and the next, because a kernel is compiled for a width.
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
        if model is not None:
            yield from find_sharing_problems(node, model)

    def run_phase(self, step: Step) -> None:
        """Add a tree to every microbatch."""
        scored: list[Scored] = step.state["rollouts"]
        batches: list[PolicyBatch] = step.state["batches"]
        groups = []
        for batch, part in zip(batches, scored, strict=True):
            routes = part.completions.routes
            values = [batch.tokens] if routes is None else [batch.tokens, routes]
            groups.append(PrefixGroups.merge(values, batch.weights > 0, part.group_size))
        longest = torch.tensor(max(group.measure_longest_tree() for group in groups))
        self.mesh.data_group.max(longest)
        width = round_width_up(int(longest))
        step.state["batches"] = [
            batch.evolve(tree=group.create_tree(width)) for batch, group in zip(batches, groups, strict=True)
        ]
