"""All metrics of a step, combined over ranks: packed into one reduction for each kind, read when they are needed."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.device import HostCopy
from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.run import Accumulator, Metric, Step, Value

OPS = ("sum", "max", "min")


@attrs.frozen
class StepTotals:
    """A step and its totals by op, float64 (numbers,), on their way from the device to the CPU."""

    step: Step
    packed: HostCopy

    @property
    def late(self) -> bool:
        """Whether the host would have to wait for a device."""
        return self.packed.arrived is not None or not self.step.settled

    def values(self, metrics: Sequence[Metric]) -> dict[str, Value]:
        """What each metric makes of its totals, once they are on the CPU."""
        self.step.settle()
        left = {op: iter(_unpacked(metrics, op, packed)) for op, packed in self.packed.read().items()}
        found: dict[str, Value] = {}
        for metric in metrics:
            totals = {name: next(left[each.op]) for name, each in metric.accumulators.items()}
            found |= metric.compute(totals, self.step)
        return found


def measure(metrics: Sequence[Metric], step: Step, mesh: Mesh, device: Device) -> StepTotals:
    """Take every metric's part of this rank and combine the parts of all; on a GPU the host does not wait for it."""
    parts = [(metric.accumulators, metric.update(step)) for metric in metrics]
    packed = {op: torch.cat(found) for op in OPS if (found := [*_packed(parts, op, mesh, device.device)])}
    for op, tensor in packed.items():
        if op == "sum":
            mesh.world.sum(tensor)
        elif op == "max":
            mesh.world.max(tensor)
        else:
            mesh.world.max(tensor.neg_())
            tensor.neg_()
    return StepTotals(step, HostCopy.start(packed))


def _packed(
    parts: Sequence[tuple[Mapping[str, Accumulator], Mapping[str, Tensor]]],
    op: str,
    mesh: Mesh,
    device: torch.device,
) -> Iterator[Tensor]:
    """This rank's parts of one op, flat: what changes nothing where it has none, or where another rank counts."""
    first = mesh.index("tensor") == 0
    counts = {
        "activations": True,
        "data": first,
        "rows": first and mesh.index("context") == 0,
        "model": mesh.replicas.rank == 0,
    }
    for accumulators, given in parts:
        for name, each in accumulators.items():
            if each.op == op:
                has_part = name in given and (op != "sum" or counts[each.of])
                part = given[name] if has_part else each.identity()
                # Parts that are on the CPU, such as counts, wait for a GPU's queue unless they are copied like this.
                part = part.detach().to(device, torch.float64, non_blocking=device.type == "cuda")
                yield part.reshape(each.shape).flatten()


def _unpacked(metrics: Sequence[Metric], op: str, packed: Tensor) -> Iterator[Tensor]:
    place = 0
    for metric in metrics:
        for each in metric.accumulators.values():
            if each.op == op:
                size = torch.Size(each.shape).numel()
                yield packed[place : place + size].view(each.shape)
                place += size
