"""AdamW on bfloat16 weights with stochastic rounding, so small updates accumulate."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, above, at_least, component, internal, setting
from drawloom.components.distributed.rng import derive_seed
from drawloom.components.optim.host_states import HostStates
from drawloom.components.optim.parameter_groups import AdamGroup, find_betas_fault, warn_unmatched_patterns
from drawloom.components.optim.streamed_states import Slots, StreamedStep, allocate_state_in_host_memory
from drawloom.components.optim.torch_groups import create_param_groups
from drawloom.components.parallel.cut_blocks import compute_first_rank_slice, describe_cut_block
from drawloom.kernels.adamw.eager import (
    ALL,
    BLOCK,
    ZERO_CODE,
    AdamwEager,
    ParamState,
    compute_scales_shape,
    compute_step_scalars,
)
from drawloom.kernels.availability import why_no_triton
from drawloom.ports import (
    Device,
    Mesh,
    NodeState,
    Parameters,
    RunInfo,
    Step,
    TensorSlice,
    build_meta_module_if_known,
    get_or_create_gradient,
)

DTYPES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}
CODES_ARITHMETIC = 379.0
"""
Operations per weight for means of 8 bits, at a GPU's float32 peak: decoding, a division, a root, noise and encoding.

Measured with `kernels/adamw/triton.py` alone on one H200: 5.66 ms for a billion weights, at 67 TFLOP/s.
"""

SCALES = ".scales"
"""End of the names of entries with the scales of a parameter's means, whose slices are those of blocks."""

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of a parameter's state by the fields of ParamState."""


@attrs.frozen
class _Launch:
    """Parameters in one kernel launch, with their learning-rate multiplier, betas and epsilon."""

    parameters: Sequence[nn.Parameter]
    stepper: Any
    lr_multiplier: float
    betas: tuple[float, float]
    eps: float


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class StochasticAdamW(HostStates):
    """
    AdamW with stochastic rounding for bfloat16 weights, without float32 master weights, or with split ones.

    Norms and biases do not decay. One launch updates all weights; groups with their own learning rate or betas take one
    more launch each. With `amsgrad`, the largest mean of squares is the maximum over the rounded means. With `states =
    "host"`, the state is in host memory (optimizer offload), and is streamed to the GPU and back in every step; with
    `memory`, as much of it as a plan chooses. Weights and state have the same bits as with the state on the device.

    The noise depends on the run's seed, the parameter's name, the element's index in the parameter and the step number.
    It is the same for any rank layout, and resuming is bit-exact.
    """

    _cuts_parameters: ClassVar[bool] = True

    parameters: Parameters
    mesh: Mesh
    job: RunInfo
    device: Device
    lr: float = setting("base learning rate", check=above(0))
    betas: tuple[float, float] = setting(
        "decay rates for the two running means", default=(0.9, 0.95), check=find_betas_fault
    )
    eps: float = setting("constant added to the denominator", default=1e-8, check=above(0))
    weight_decay: float = setting("decoupled weight decay coefficient", default=0.1, check=at_least(0))
    amsgrad: bool = setting(
        "divide by the largest mean of squares so far (Reddi et al. 2018); keeps a third tensor per parameter",
        default=False,
        impact="incompatible",
    )
    maximize: bool = setting("maximize the objective instead of minimizing it", default=False)
    groups: list[AdamGroup] = setting("parameter groups with their own options; the first match wins", factory=list)
    state_dtype: Literal["uint8", "bfloat16", "float32"] = setting(
        "running mean dtype; bfloat16 is rounded stochastically too; with uint8, the means of matrices are codes "
        "of 8 bits with a scale for 256 elements of a row, and others are float32",
        default="bfloat16",
        impact="incompatible",
    )
    split_master_weights: bool = setting(
        "keep float32 master weights: a bfloat16 weight has their upper half, and the state 16 bits more; weights "
        "are then rounded to the nearest",
        default=False,
        impact="incompatible",
    )
    implementation: Literal["auto", "triton", "eager"] = setting(
        "auto is triton on a GPU, else eager; both give the same bits", default="auto", impact="safe"
    )
    _params: dict[str, ParamState] = internal(factory=dict)
    _launches: list[_Launch] = internal(factory=list)
    _steps: int = internal(0)
    _last: Step | None = internal(None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report unmatched groups, and settings that exclude each other, or do not suit the device or the precision."""
        yield from super().constraints(node)
        yield from warn_unmatched_patterns(node)
        device = node.neighbour("device")
        if node.settings["implementation"] == "triton" and device and device.settings.get("kind") == "cpu":
            yield node.problem("implementation", "'triton' runs on GPUs, and the device is the CPU", "write 'auto'")
        if node.settings["amsgrad"] and node.settings["state_dtype"] == "uint8":
            text = "the largest mean of squares can't have 8 bits"
            yield node.problem("amsgrad", text, "write state_dtype = 'bfloat16', or amsgrad = false")
        stages = node.neighbour("parameters")
        precision = stages and stages.neighbour("precision")
        if node.settings["split_master_weights"] and precision and precision.settings.get("parameter") != "bfloat16":
            text = f"weights in {precision.settings.get('parameter')} are not split"
            yield node.problem("split_master_weights", text, "write precision.parameter = 'bfloat16'")
        model, mesh = stages and stages.neighbour("model"), node.neighbour("mesh")
        # Adapters change the trained parameters when the run starts.
        if node.settings["state_dtype"] == "uint8" and model and mesh and stages and not stages.neighbours("adapters"):
            module, ranks = build_meta_module_if_known(model) or nn.Module(), mesh.settings.get("tensor", 1)
            for name, parameter in module.named_parameters():
                path, _, leaf = name.rpartition(".")
                part = compute_first_rank_slice(module.get_submodule(path), leaf, ranks)
                if parameter.ndim > 1 and (fault := describe_cut_block(part, OWNER, BLOCK)):
                    yield node.problem("state_dtype", f"{name} {fault}", REMEDY)
                    return

    def open(self) -> None:
        """Create the optimizer state, zeros in its dtypes, and launches for equal kinds of parameters."""
        slices, named = self.parameters.parameter_slices(), self.parameters.named_parameters()
        on_host = self._choose_parameters_with_host_state()
        if on_host:
            self._transfers = self.open_transfers(self.device.device)
        self.state_slices()  # raises UserError for slices that cut 8-bit blocks
        state = self._allocate_state(dict(named), on_host)
        groups = create_param_groups(self.parameters, self.groups, self.weight_decay, self.mesh, self.eps)
        decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
        for name, parameter in named:
            first_index, row_width, row_stride = compute_flat_slice_layout(slices[name])
            self._params[name] = ParamState(
                parameter.detach(),
                weight_decay=decay[parameter],
                key=derive_seed(self.job.seed, "stochastic_adamw", name),
                first_index=first_index,
                row_width=row_width,
                row_stride=row_stride,
                **state[name],
            )
        streamed_parameters = {parameter for name, parameter in named if name in on_host}
        kinds: dict[tuple[bool, float, tuple[float, float], float], list[nn.Parameter]] = {}
        for group in groups:
            betas, eps = group.get("betas", self.betas), group.get("eps", self.eps)
            for parameter in group["params"]:
                kind = parameter in streamed_parameters, group["lr_multiplier"], betas, eps
                kinds.setdefault(kind, []).append(parameter)
        resident = self._choose_stepper_class()
        states = {parameter: self._params[name] for name, parameter in self.parameters.named_parameters()}
        streamed = self._make_streamed_stepper_factory(resident, on_host)
        for (is_streamed, lr_multiplier, betas, eps), parts in kinds.items():
            stepper = (streamed if is_streamed else resident)([states[part] for part in parts], self.maximize)
            self._launches.append(_Launch(parts, stepper, lr_multiplier, betas, eps))

    def run_phase(self, step: Step) -> None:
        """
        Update the weights unless the step is skipped, clear the gradients, and write the learning rate as `lr`.

        A group multiplies the learning rate by its `lr_multiplier`.
        """
        step.state["lr"] = lr = self.lr * step.state.get("lr_factor", 1.0)
        step.apply_update_unless_skipped(partial(self._update_weights, lr, self._wait_and_count_unskipped_steps() + 1))
        self._last = step
        for _, parameter in self.parameters.named_parameters():
            parameter.grad = None

    def _update_weights(self, lr: float, step_number: int, skip: Tensor | None) -> None:
        for launch in self._launches:
            scalars = compute_step_scalars(lr * launch.lr_multiplier, launch.betas, launch.eps, step_number)
            launch.stepper.step(
                [get_or_create_gradient(part) for part in launch.parameters], scalars, step_number, skip
            )
        if self._streamed_steps:
            self._streamed_steps[0].stream.start_prefetch()

    @property
    def _streamed_steps(self) -> list[StreamedStep]:
        """The launches' steppers with state in host memory."""
        return [launch.stepper for launch in self._launches if isinstance(launch.stepper, StreamedStep)]

    @property
    def _fields_by_key(self) -> dict[str, str]:
        """ParamState's field names, such as exp_avg, by their keys in the state dict, such as mean."""
        fields = {"mean": "exp_avg", "square": "exp_avg_sq"}
        fields |= {"max_square": "max_exp_avg_sq"} if self.amsgrad else {}
        return fields | ({"remainder": "remainder"} if self.split_master_weights else {})

    def _compute_state_specs(self, parameter: nn.Parameter) -> Specs:
        """Return (shape, dtype) by ParamState's fields for a parameter's state."""
        shape, means = tuple(parameter.shape), DTYPES[self.state_dtype]
        has_codes = means == torch.uint8 and parameter.ndim > 1
        if means == torch.uint8 and not has_codes:
            means = torch.float32  # a slice of a vector would cut blocks
        specs = {
            field: (shape, torch.int16 if field == "remainder" else means) for field in self._fields_by_key.values()
        }
        if not has_codes:
            return specs
        scales = (compute_scales_shape(shape), torch.float32)
        return specs | {"exp_avg_scale": scales, "exp_avg_sq_scale": scales}

    def _allocate_state(
        self, parameters: Mapping[str, nn.Parameter], on_host: Sequence[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Return zeros by parameter and by ParamState's fields, on the device or in host memory."""
        specs = {name: self._compute_state_specs(parameter) for name, parameter in parameters.items()}
        state = {
            name: {
                field: torch.zeros(shape, dtype=dtype, device=parameter.device)
                for field, (shape, dtype) in specs[name].items()
            }
            for name, parameter in parameters.items()
            if name not in on_host
        }
        if self._transfers is not None:
            state |= allocate_state_in_host_memory(self._transfers, {name: specs[name] for name in on_host})
        for fields in state.values():
            if "exp_avg_scale" in fields:
                fields["exp_avg"].fill_(ZERO_CODE)
        return state

    def _make_streamed_stepper_factory(self, implementation: Any, on_host: list[str]) -> Any:
        """Return a function from ParamStates to a stepper that streams them; None without state in host memory."""
        if self._transfers is None:
            return None
        slots = Slots(self._transfers, self.device.device, self._compute_slot_bytes(on_host))
        slots.allocate_slots()
        return partial(StreamedStep, implementation, slots)

    def _wait_and_count_unskipped_steps(self) -> int:
        """Return the number of steps without the skipped ones, after waiting for the last step."""
        if self._last is not None:
            self._steps += not self._last.skip_reason
            self._last = None
        return self._steps

    def _count_state_bytes_by_parameter(self) -> dict[str, int]:
        """Return the bytes of the state by parameter."""
        return {
            name: sum(prod(shape) * dtype.itemsize for shape, dtype in self._compute_state_specs(parameter).values())
            for name, parameter in self.parameters.named_parameters()
        }

    def count_elementwise_flops_per_update(self) -> float:
        """Return the operations for means of 8 bits; updates of other means take as long as their memory traffic."""
        named = self.parameters.named_parameters()
        coded = (parameter for _, parameter in named if "exp_avg_scale" in self._compute_state_specs(parameter))
        return CODES_ARITHMETIC * sum(parameter.numel() for parameter in coded)

    def state_slices(self) -> dict[str, TensorSlice | None]:
        slices = dict(self.parameters.parameter_slices())
        return slices | {
            f"{name}{SCALES}": compute_scales_slice(name, slices[name])
            for name, parameter in self.parameters.named_parameters()
            if "exp_avg_scale" in self._compute_state_specs(parameter)
        }

    def state_dict(self) -> NodeState:
        """Return running means by parameter (its shape, `state_dtype`), and the step count."""
        steps = self._wait_and_count_unskipped_steps()
        if self._transfers is not None:
            self._transfers.synchronize()
        state = {
            name: {key: getattr(param, field) for key, field in self._fields_by_key.items()} | {"steps": steps}
            for name, param in self._params.items()
        }
        return state | {f"{name}{SCALES}": scales for name, scales in self._8bit_scales_by_parameter().items()}

    def _8bit_scales_by_parameter(self) -> dict[str, dict[str, Tensor]]:
        """Return the scales by parameter name, for parameters with 8-bit means."""
        named = {
            name: {"mean": param.exp_avg_scale, "square": param.exp_avg_sq_scale}
            for name, param in self._params.items()
        }
        return {
            name: {key: scale for key, scale in scales.items() if scale is not None}
            for name, scales in named.items()
            if self._params[name].has_8bit_moments
        }

    def load_state_dict(self, state: NodeState) -> None:
        """Copy a state into this optimizer. Raises KeyError for other parameters' state."""
        scales = {f"{name}{SCALES}": values for name, values in self._8bit_scales_by_parameter().items()}
        if other := state.keys() ^ (self._params.keys() | scales.keys()):
            raise KeyError(f"optimizer state differs for {sorted(other)}")
        steps = {state[name]["steps"] for name in self._params}
        if len(steps) > 1:
            raise ValueError(
                f"the state's parameters have different step counts, {sorted(steps)}; "
                "optim.stochastic_adamw keeps one count for all"
            )
        if self._transfers is not None:
            self._transfers.synchronize()
        for stepper in self._streamed_steps:
            stepper.stream.drop_prefetched()
        for name, param in self._params.items():
            for key, field in self._fields_by_key.items():
                getattr(param, field).copy_(state[name][key])
        for name, values in scales.items():
            for key, scale in values.items():
                scale.copy_(state[name][key])
        self._steps, self._last = steps.pop() if steps else 0, None

    def _choose_stepper_class(self) -> Any:
        """Return the stepper class. Raises UserError if `implementation` is triton and the device can't run it."""
        wanted, problem = self.implementation, ""
        if wanted == "auto" and self.device.device.type == "cpu":
            wanted = "eager"
        if wanted != "eager":
            problem = why_no_triton(self.device.device)
        if wanted == "triton" and problem:
            raise UserError(f"optim.stochastic_adamw: implementation is 'triton', but {problem}; write 'auto'", 2)
        if wanted == "eager" or problem:
            return AdamwEager
        from drawloom.kernels.adamw.triton import AdamwTriton

        return AdamwTriton


OWNER = "means of 8 bits have"
REMEDY = "write state_dtype = 'bfloat16', or another mesh.tensor"


def compute_scales_slice(name: str, part: TensorSlice | None) -> TensorSlice | None:
    """
    Return the slice of scales for a slice of a parameter. Raises UserError if the slice cuts a block.
    """
    if part is None:
        return None
    if fault := describe_cut_block(part, OWNER, BLOCK):
        raise UserError(f"optim.stochastic_adamw: {name} {fault}; {REMEDY}", 2)
    return TensorSlice(
        compute_scales_shape(part.shape),
        (*part.offsets[:-1], part.offsets[-1] // BLOCK),
        compute_scales_shape(part.size),
    )


class FlatLayout(NamedTuple):
    """Layout of a slice in the flat tensor: the first element's index, the rows' width and stride, in elements."""

    first: int
    width: int
    stride: int


def compute_flat_slice_layout(part: TensorSlice | None) -> FlatLayout:
    """
    Return the layout of a slice in the flat tensor.

    None is the whole tensor. Raises UserError for a slice whose rows are not equally far apart.
    """
    if part is None or not part.numel:
        return FlatLayout(0, ALL, 0)
    strides = [prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
    first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
    last = max((dim for dim, size in enumerate(part.shape) if part.size[dim] != size), default=0)
    numbers_rows = [dim for dim in range(last) if part.size[dim] > 1]
    if not numbers_rows:
        return FlatLayout(first, ALL, 0)
    if any(strides[dim] != strides[inner] * part.size[inner] for dim, inner in pairwise(numbers_rows)):
        text = f"a slice of shape {part.size} at {part.offsets} of a tensor of shape {part.shape}"
        raise UserError(
            f"optim.stochastic_adamw can't number the noise for {text}; change the mesh, or use optim.adamw"
        )
    return FlatLayout(first, part.size[last] * strides[last], strides[numbers_rows[-1]])
