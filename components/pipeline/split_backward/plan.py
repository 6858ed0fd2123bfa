"""How the gradients of each weight of a stage are put off, by what the stage's graph allows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import attrs
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from drawloom.components.pipeline.split_backward.accumulate import DeferredWeightGrads, Roots
from drawloom.components.pipeline.split_backward.autograd_partition import ParamGroup, Paths, paths_of
from drawloom.components.pipeline.split_backward.matmul_grads import Product, product_of
from drawloom.kernels.deferred_grads import Deferral


@attrs.frozen(eq=False)
class Cut:
    """A node from which the graph is gone through again, for these weights alone, with what came in over its edges."""

    edges: list[GradientEdge]
    weights: list[Tensor]


@attrs.define(eq=False)
class Plan:
    """
    What the pass for the inputs collects for the weights, beside what operations of ours put off.

    `vectors` and `at_once`: their gradients, because these are cheap, or can't be had without the whole graph. It is
    the sum over all uses, but for those that are put off. `products` and `cuts`: what comes in over their edges.
    `apart`: nothing, for these outputs (by position) depend on weights alone.
    """

    vectors: list[Tensor] = attrs.field(factory=list)
    eager: list[Tensor] = attrs.field(factory=list)
    products: list[Product] = attrs.field(factory=list)
    cuts: list[Cut] = attrs.field(factory=list)
    param_only_outputs: list[int] = attrs.field(factory=list)

    def asked(self) -> list[Tensor | GradientEdge]:
        """Whose gradients the pass for the inputs shall give, beside the inputs'."""
        edges = [product.edge for product in self.products]
        return [*self.vectors, *self.eager, *edges, *(edge for cut in self.cuts for edge in cut.edges)]

    def rest(self, found: Iterator[Tensor | None], outputs: Roots, deferral: Deferral) -> DeferredWeightGrads:
        """What remains to be done with the gradients that were found, given in the order of `asked`."""
        ready = [(weight, grad) for weight, grad in zip(self.vectors, found, strict=False) if grad is not None]
        rest = DeferredWeightGrads(ready=ready, roots=[outputs[position] for position in self.param_only_outputs])
        for weight, grad in zip(self.eager, found, strict=False):
            if grad is not None:
                deferral.of(weight).wait(_itself, grad)
        for product, grad in zip(self.products, found, strict=False):
            if grad is not None:
                deferral.of(product.weight).wait(product.gradient, grad, product.factor)
        for cut in self.cuts:
            came = zip(cut.edges, found, strict=False)
            roots: Roots = [(edge, grad) for edge, grad in came if grad is not None]
            rest.cuts += [(roots, cut.weights)]
        rest.put_off = deferral.take()
        return rest


def _itself(grad: Tensor) -> Tensor:
    return grad


@attrs.define(eq=False)
class StageWeights:
    """
    The parameters of a stage, each once, sorted for all its microbatches; frozen ones may be among them.

    A vector's gradient is but a sum: to put it off would cost as much as to find it.
    """

    parameters: list[Tensor]
    _trained: list[bool] = attrs.field(init=False, factory=list)
    _vectors: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    _matrices: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    _usual: Plan = attrs.field(init=False, factory=Plan)
    """Where operations of ours put all matrices off."""

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> Self:
        """Those of a stage: `StageWeights.of(module.parameters())`."""
        return cls(list(parameters))

    def plan(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deferral: Deferral) -> Plan:
        """How to put the gradients off in the graph between outputs and inputs."""
        self._sort()
        if deferral.known.isdisjoint(self._vectors) and self._matrices.keys() <= deferral.known:
            return self._usual
        every = self._vectors | self._matrices
        plan = Plan(eager=[weight for key, weight in every.items() if key in deferral.known])
        paths = paths_of(outputs, inputs, deferral)
        for group in paths.groups:
            _place(group, plan, outputs, paths, deferral)
        return plan

    def _sort(self) -> None:
        """Again, if other parameters are trained than the last time."""
        trained = [parameter.requires_grad for parameter in self.parameters]
        if trained != self._trained:
            every = {id(weight): weight for weight in self.parameters if weight.requires_grad}
            self._vectors = {key: weight for key, weight in every.items() if is_vector(weight)}
            self._matrices = {key: weight for key, weight in every.items() if key not in self._vectors}
            self._usual = Plan(list(self._vectors.values()), list(self._matrices.values()))
            self._trained = trained


def is_vector(weight: Tensor) -> bool:
    """Whether a weight has no more than one dimension that counts."""
    return weight.ndim < 2 or weight.numel() == max(weight.shape)


def _place(group: ParamGroup, plan: Plan, outputs: Sequence[Tensor], paths: Paths, deferral: Deferral) -> None:
    """Put a group where it is cheapest to serve."""
    nodes = {join.node for join in group.joins}
    node = next(iter(nodes))
    unknown = [weight for weight in group.weights if id(weight) not in deferral.known]
    if len(unknown) < len(group.weights):
        plan.eager += unknown  # where those that an operation of ours knows are already
    elif nodes == {None}:
        plan.param_only_outputs += [join.position for join in group.joins]
    elif all(map(is_vector, unknown)):
        plan.vectors += unknown
    elif products := _products(group):
        plan.products += products
    elif node is not None and len(nodes) == 1 and _goes_twice([node, *group.nodes]):
        plan.cuts.append(Cut(paths.slots(node, outputs), unknown))
    else:
        plan.eager += unknown


def _products(group: ParamGroup) -> list[Product]:
    """The group as matrix products, if it is nothing else."""
    found = [product_of(join) for join in group.joins]
    products = [product for product in found if product is not None]
    return products if len(products) == len(found) else []


def _goes_twice(nodes: Sequence[Node]) -> bool:
    """Whether nodes can be asked for one gradient at a time, and hold what they saved rather than recompute it."""
    return not any(isinstance(node, BackwardCFunction) or _unpacks(node) for node in nodes)


def _unpacks(node: Node) -> bool:
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_"))
    return any(getattr(each, "unpack_hook", None) is not None for each in saved)
