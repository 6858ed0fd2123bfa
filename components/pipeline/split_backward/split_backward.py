"""
A stage's backward pass in two: first for its inputs, which another stage waits for, then for its weights.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241) fill their bubbles with
the second part. Three ways lead there, by what the stage is made of:

1. Operations of ours (kernels/deferred_grads.py) queue what their weights need. The graph is gone through once, and
   freed.
2. Other matrix products with a weight (`nn.Linear`) are found in the graph and served likewise. Elsewhere the graph is
   cut where the weight's path joins the activations', and gone through again from there, for the weight alone.
3. What can't be cut (recomputed or shared between such places, or a node written in Python, which finds all its
   gradients in one go) is computed with the inputs' gradients, and added to the weights with the rest.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.accumulate import DeferredWeightGrads, Roots
from drawloom.components.pipeline.split_backward.plan import StageWeights
from drawloom.graph import UserError
from drawloom.kernels.deferred_grads import Deferral


class SplitBackward:
    """
    Both backward passes of one stage for one microbatch; make one for each pair.

        weights = StageWeights.of(module.parameters())       # once for each stage and run

        split = SplitBackward(weights)
        with split.forward():
            output = module(given, shared)
        ...
        (grad_given,) = split.backward_input([output], [grad_output], [given])    # I: send it, and drop the output
        ...
        split.backward_weight()                              # W: now the parameters have their gradients

    What ran within `forward` can go backward as a whole instead: `torch.autograd.backward(output, grad_output)`.
    A pass that fails leaves nothing behind but what W has added to some weights already.
    """

    __slots__ = ("_deferral", "_rest", "_weights")

    def __init__(self, weights: StageWeights) -> None:
        self._weights = weights
        self._deferral = Deferral()
        self._rest: DeferredWeightGrads | None = None

    def forward(self) -> AbstractContextManager[None]:
        """The stage's forward pass runs within this; without it our operations are treated as anybody else's."""
        return self._deferral.recording()

    def backward_input(
        self, outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
    ) -> list[Tensor | None]:
        """
        I: the gradient of each input, None for one that has none. No `.grad` changes, and no weight's hook is called.

        Outputs and inputs are what the stage gave and took, one by one; integers, None and tensors without gradient are
        passed over. `output_grads` are those of the outputs, None for one that nobody asked for; or None if every
        output is a loss, whose gradient is 1. The graph is freed as in a full backward pass, except where it had to be
        cut. On a stage without an input that needs a gradient (the first) this pass serves the weights alone.

        UserError if the stage recomputes in a re-entrant checkpoint, which torch can't split.
        """
        if self._rest is not None:
            raise RuntimeError("backward_input has been called already; call backward_weight, or make a new pair")
        roots = _roots(outputs, output_grads)
        wanted = [given for given in inputs if _differentiable(given)]
        try:
            found = iter(self._go_through(roots, wanted))
        except BaseException:
            for each in self._deferral.take():
                each.forget()
            raise
        return [next(found) if _differentiable(given) else None for given in inputs]

    def backward_weight(self) -> None:
        """
        W: each weight's gradient is added to its `.grad`, and its hooks are called once.

        To be called in the stream that the forward pass ran in.
        """
        rest, self._rest = self._rest, None
        if rest is None:
            raise RuntimeError("backward_weight has nothing to do: it comes after backward_input, and once")
        try:
            rest.accumulate()
        finally:
            rest.clear()

    def _go_through(self, roots: Roots, inputs: list[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs; what is left to do for the weights is kept."""
        outputs, grads = [output for output, _ in roots], [grad for _, grad in roots]
        plan = self._weights.plan(outputs, inputs, self._deferral)
        found: list[Tensor | None] = [None] * len(inputs)
        asked: list[Any] = [*inputs, *plan.asked()]
        if outputs and asked:
            with (
                self._deferral.defer(except_for=inputs),
                _hooks_off(plan.vectors + plan.eager),
                _refusing_re_entrance(),
            ):
                again = bool(plan.cuts)
                found = list(torch.autograd.grad(outputs, asked, grads, retain_graph=again, allow_unused=True))
        self._rest = plan.rest(iter(found[len(inputs) :]), roots, self._deferral)
        return found[: len(inputs)]


def _roots(outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None) -> Roots:
    """The outputs to go backward from, with their gradients."""
    if output_grads is None:
        return [(output, None) for output in outputs if _differentiable(output)]
    pairs = zip(outputs, output_grads, strict=True)
    return [(output, grad) for output, grad in pairs if grad is not None and _differentiable(output)]


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@contextmanager
def _hooks_off(weights: Iterable[Tensor]) -> Iterator[None]:
    """Autograd calls a weight's hooks also when it only hands its gradient out, which is not yet their time."""
    hooked = [(hooks, dict(hooks)) for weight in weights if (hooks := weight._backward_hooks)]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)


@contextmanager
def _refusing_re_entrance() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UserError(
            "split backward: the stage recomputes in a re-entrant checkpoint, which can't go backward for the inputs "
            "alone; write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        ) from error
