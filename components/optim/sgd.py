"""Stochastic gradient descent with momentum."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from drawloom import NodeView, Problem, above, at_least, between, component, setting
from drawloom.components.optim.parameter_groups import ParameterGroup
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.ports import Mesh, Parameters


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class SGD(TorchOptimizer):
    """SGD with momentum; norms and biases do not decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting("base learning rate", check=above(0))
    momentum: float = setting(
        "momentum decay rate (momentum is a running sum of gradients)", default=0.9, check=between(0, 1)
    )
    dampening: float = setting(
        "gradient fraction left out of the momentum, except at the first step (dampening)",
        default=0.0,
        check=between(0, 1),
    )
    nesterov: bool = setting("add the gradient to its momentum once more (Nesterov momentum)", default=False)
    maximize: bool = setting("maximize the objective instead of minimizing it", default=False)
    weight_decay: float = setting(
        "L2 weight decay coefficient: the gradient grows by this times the weight", default=0.0, check=at_least(0)
    )
    groups: list[ParameterGroup] = setting(
        "parameter groups with their own options; the first match wins", factory=list
    )

    def moment_names_by_parameter(self) -> dict[str, Sequence[str]]:
        """Return `momentum_buffer` for every parameter, or no names without momentum."""
        names = ("momentum_buffer",) if self.momentum else ()
        return {name: names for name, _ in self.parameters.named_parameters()}

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Require momentum without dampening for Nesterov momentum, and momentum for dampening."""
        yield from super().constraints(node)
        momentum, dampening = node.settings["momentum"], node.settings["dampening"]
        if node.settings["nesterov"] and (not momentum or dampening):
            text = f"Nesterov momentum needs momentum above 0 and no dampening; they are {momentum:g} and {dampening:g}"
            yield node.problem("nesterov", text, "write momentum = 0.9 and dampening = 0.0")
        elif dampening and not momentum:
            yield node.problem("dampening", "dampening does nothing without momentum", "write momentum = 0.9")
        streams = node.settings["states"] == "host" or node.neighbour("memory")
        if streams and not momentum:
            yield node.problem("momentum", "without momentum there is no state to stream", "write states = 'device'")
        if streams and dampening:
            text = "momentum in host memory begins with zeros, and with dampening it begins with the first gradient"
            yield node.problem("dampening", text, "write states = 'device', or dampening = 0.0")

    def _create_optimizers(self) -> list[torch.optim.Optimizer]:
        options = {name: getattr(self, name) for name in ("momentum", "dampening", "nesterov", "maximize")}
        return [torch.optim.SGD(self._create_torch_param_groups(), fused=True, **options)]

    def _update_weights(self, optimizer: torch.optim.Optimizer, lr: float, skip: Tensor | None) -> None:
        has_begun = any("momentum_buffer" in state for state in optimizer.state.values())
        if skip is not None and self.dampening and not has_begun:
            # With dampening, momentum begins as the whole first gradient, which must not come from a skipped step.
            # Until there is momentum, the host waits for the device to decide.
            if skip.item():
                return
            skip = None
        if self.momentum and not self.dampening and (skip is not None or has_begun):
            self._create_missing_momentum()
        super()._update_weights(optimizer, lr, skip)

    def _create_missing_momentum(self) -> None:
        """
        Fill missing momentum with zeros.

        torch would leave it uninitialized if the first step is skipped, and rejects a mixture of weights with and
        without it.
        """
        for _, parameter in self.parameters.named_parameters():
            state = self._optimizers[0].state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
