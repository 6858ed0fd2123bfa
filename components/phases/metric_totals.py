"""All metrics of a step, combined over ranks: packed into one reduction for each kind, read when they are needed."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.run import METRIC_TOTALS, Accumulator, Metric, Step, Value
from drawloom.components.ports.tracking import DistributionMetric, Histogram

OPS = ("sum", "max", "min")


@attrs.frozen
class Measurements:
    """Numbers and histograms of a step, by name."""

    values: Mapping[str, Value]
    distributions: Mapping[str, Histogram]


def read_measurements(metrics: Sequence[Metric], step: Step) -> Measurements:
    """Return what each metric computes from its totals of a measured step; waits until these are on the host."""
    rest = {op: iter(_unpacked(metrics, op, packed)) for op, packed in step.state.on_host(METRIC_TOTALS).items()}
    values: dict[str, Value] = {}
    distributions: dict[str, Histogram] = {}
    for metric in metrics:
        totals = {name: next(rest[accumulator.op]) for name, accumulator in metric.accumulators.items()}
        values |= metric.compute(totals, step)
        if isinstance(metric, DistributionMetric):
            distributions |= metric.distributions(totals, step)
    return Measurements(values, distributions)


def measure(metrics: Sequence[Metric], step: Step, mesh: Mesh, device: Device) -> None:
    """Combine every metric's accumulators over ranks, and write the totals into the step's state. Does not wait."""
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
    step.state[METRIC_TOTALS] = packed


def _packed(
    parts: Sequence[tuple[Mapping[str, Accumulator], Mapping[str, Tensor]]],
    op: str,
    mesh: Mesh,
    device: torch.device,
) -> Iterator[Tensor]:
    """This rank's parts of one op, flat: what changes nothing where it has none, or where another rank counts."""
    first = mesh.indices.tensor == 0
    counts = {
        "activations": True,
        "data": first,
        "rows": first and mesh.indices.context == 0,
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
