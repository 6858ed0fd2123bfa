"""Base of torch's optimizers: the step at a scheduled learning rate, and state by parameter name."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, internal
from drawloom.components.optim.gradient_steps import ADAM_MOMENTS, WideGradientStep
from drawloom.components.optim.host_states import HostStates
from drawloom.components.optim.parameter_groups import (
    ParameterGroup,
    find_unsupported_parametrization,
    warn_unmatched_patterns,
)
from drawloom.graph import component_base_class
from drawloom.ports import Mesh, NodeState, Parameters, Step, TensorSlice

if TYPE_CHECKING:
    from drawloom.components.optim.streamed_states import Slots, StreamedTorchStep

KEEP_UPDATES = (
    'write use = "optim.stochastic_adamw" in [{}], or keep float32 masters, as --overlay with_mixed_precision does: '
    'parameter = "float32", compute = "bfloat16"'
)


TRITON_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights that the kernel is tested with."""


def create_fastest_adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """
    Return the fastest AdamW for the parameter groups: torch's fused one, or on GPUs a Triton kernel with less memory
    traffic. Both have the same state format.
    """
    groups = list(groups)
    if not all(_fits_triton(part) for group in groups for part in group["params"]):
        return torch.optim.AdamW(groups, fused=True, **options)
    from drawloom.components.optim.adamw_step import AdamWTriton  # most machines for checks have no GPU

    return AdamWTriton(groups, fused=True, **options)


def _fits_triton(parameter: nn.Parameter) -> bool:
    from drawloom.kernels.availability import why_no_triton

    has_triton = parameter.is_cuda and not why_no_triton(parameter.device)
    return has_triton and parameter.dtype in TRITON_DTYPES and parameter.is_contiguous()


@contextmanager
def _cast_gradients_then_free(wide: Sequence[nn.Parameter]) -> Iterator[None]:
    """Cast gradients to their parameters' dtypes."""
    dtypes = [part.grad_dtype for part in wide]
    for part in wide:
        narrow, part.grad = part.grad.to(part.dtype), None  # type: ignore[union-attr]
        part.grad_dtype = part.dtype
        part.grad = narrow
    yield
    for part, dtype in zip(wide, dtypes, strict=True):  # autograd sums the next step's gradients in the wide dtype
        part.grad, part.grad_dtype = None, dtype


@component_base_class
class TorchOptimizer(HostStates):
    """
    Training phase and saved state for torch optimizers, which subclasses create.

    Every trained parameter belongs to one optimizer. With `states = "host"`, running means are in host memory
    (optimizer offload), and are streamed to the device and back in every step, in pieces of whole parameters; with
    `memory`, as much of them as a plan chooses. Weights and state have the same bits as with the state on the device.
    """

    _scales_by_role: ClassVar[bool] = False

    parameters: Parameters
    mesh: Mesh
    lr: float
    weight_decay: float
    groups: Sequence[ParameterGroup]
    _optimizers: list[torch.optim.Optimizer] = internal(factory=list)
    _streamed: "dict[torch.optim.Optimizer, StreamedTorchStep]" = internal(factory=dict)
    _slots: "Slots | None" = internal(None)
    _host_state: dict[str, dict[str, Tensor]] = internal(factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Refuse parametrizations for others, and warn about unmatched groups and about updates lost by rounding."""
        yield from super().constraints(node)
        yield from warn_unmatched_patterns(node)
        if not cls._scales_by_role:
            yield from find_unsupported_parametrization(node)
        stages = node.neighbour("parameters")
        precision = stages and stages.neighbour("precision")
        if precision and precision.settings.get("parameter") == "bfloat16":
            # Half of the spacing of numbers with 8 significant bits, at the upper end of a binade.
            text = f"[{node.name}] rounds bfloat16 to the nearest: updates of less than 1/512 of a weight are lost"
            yield precision.warning("parameter", text, KEEP_UPDATES.format(node.name))

    def moment_names_by_parameter(self) -> dict[str, Sequence[str]]:
        """Return the names of the running means kept for every parameter from its first step on."""
        raise NotImplementedError

    def _create_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the torch optimizers of all trained parameters."""
        raise NotImplementedError

    def open(self) -> None:
        """Create the optimizers, and allocate state in host memory."""
        self._optimizers = self._create_optimizers()
        on_host = self._choose_parameters_with_host_state()
        if not on_host:
            return
        from drawloom.components.optim.streamed_states import Slots, StreamedTorchStep, allocate_state_in_host_memory

        named, moments = dict(self.parameters.named_parameters()), self.moment_names_by_parameter()
        device = named[on_host[0]].device
        self._transfers = self.open_transfers(device)
        specs = {name: dict.fromkeys(moments[name], (tuple(named[name].shape), named[name].dtype)) for name in on_host}
        self._host_state = allocate_state_in_host_memory(self._transfers, specs)
        self._slots = slots = Slots(self._transfers, device, self._compute_slot_bytes(on_host))
        slots.allocate_slots()
        states = {named[name]: state for name, state in self._host_state.items()}
        self._streamed = {optimizer: StreamedTorchStep(optimizer, slots, states) for optimizer in self._optimizers}
        self._create_host_state_step_counters()

    def _create_host_state_step_counters(self) -> None:
        """Create the counters of parameters with state in host memory, where torch expects them if there is state."""
        for optimizer, streamed in self._streamed.items():
            for part in streamed.parameters:
                if {*ADAM_MOMENTS} <= optimizer.state[part].keys():
                    optimizer.state[part].setdefault("step", torch.zeros((), device=part.device))

    def _count_state_bytes_by_parameter(self) -> dict[str, int]:
        """Return the moments' bytes by parameter, without the step counters, 4 bytes per parameter."""
        moments = self.moment_names_by_parameter()
        return {name: len(moments[name]) * part.nbytes for name, part in self.parameters.named_parameters()}

    def forecast_state_after_first_step(self) -> NodeState:
        """Return the state after a step with a gradient for every parameter, on the meta device."""
        from drawloom.components.optim.named_state import create_state_on_meta

        moments = self.moment_names_by_parameter()
        return {name: create_state_on_meta(part, moments[name]) for name, part in self.parameters.named_parameters()}

    def run_phase(self, step: Step) -> None:
        """
        Update the weights unless the step is skipped, and clear the gradients.

        The learning rate, written as `lr`, is the base learning rate times `lr_factor` (1 without one). A group
        multiplies it by its `lr_multiplier`.
        """
        step.state["lr"] = lr = self.lr * step.state.get("lr_factor", 1.0)
        for optimizer in self._optimizers:
            step.apply_update_unless_skipped(partial(self._update_weights, optimizer, lr))
            optimizer.zero_grad()
        for streamed in [*self._streamed.values()][:1]:
            streamed.stream.start_prefetch()

    def _update_weights(self, optimizer: torch.optim.Optimizer, lr: float, skip: Tensor | None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        # torch's fused optimizers read the flag under this name, which GradScaler sets.
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        # torch's fused optimizers require gradients in the dtype of the weights; ours do not.
        groups = [] if isinstance(optimizer, WideGradientStep) else optimizer.param_groups
        parts = [part for group in groups for part in group["params"]]
        wide = [part for part in parts if part.grad is not None and part.grad.dtype != part.dtype]
        with _cast_gradients_then_free(wide) if wide else nullcontext():
            if optimizer in self._streamed:
                self._step_in_pieces(optimizer)
            else:
                optimizer.step()

    def _step_in_pieces(self, optimizer: torch.optim.Optimizer) -> None:
        """Update an optimizer's weights, and its state in host memory, which is streamed in pieces."""
        self._streamed[optimizer].step(optimizer.step)

    def _create_torch_param_groups(self, eps: float = 1.0) -> list[dict[str, Any]]:
        """Return the parameter groups in torch's form, with scaled `eps`."""
        from drawloom.components.optim.torch_groups import create_param_groups

        return create_param_groups(self.parameters, self.groups, self.weight_decay, self.mesh, eps)

    def state_slices(self) -> dict[str, TensorSlice | None]:
        return self.parameters.parameter_slices()

    def state_dict(self) -> NodeState:
        """Return the optimizer's state by parameter name; tensors of any shape."""
        if self._transfers is not None:
            self._transfers.synchronize()
        states = {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}
        # {} before a parameter's first gradient
        return {name: dict(states.get(parameter, {})) for name, parameter in self.parameters.named_parameters()}

    def load_state_dict(self, state: NodeState) -> None:
        """Copy a state into this optimizer. Raises KeyError for the state of other parameters."""
        if self._transfers is not None:
            self._transfers.synchronize()
        from drawloom.components.optim.named_state import load_named_state

        names, named = self.moment_names_by_parameter(), self.parameters.named_parameters()
        load_named_state(self._optimizers, named, state, names, omitted=self._host_state)
        # load_named_state would put these moments on the device. They are zero before the first step.
        for name, moments in self._host_state.items():
            for key, tensor in moments.items():
                saved = state[name].get(key) if state else None
                tensor.zero_() if saved is None else tensor.copy_(saved)
        for streamed in self._streamed.values():
            streamed.stream.drop_prefetched()
            streamed.use_host_state()
        self._create_host_state_step_counters()
