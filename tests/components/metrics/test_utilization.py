"""TFLOP/s and MFU of a step."""

from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import nn

from drawloom.components.metrics.utilization import Utilization
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.features import StageFeature
from drawloom.components.ports.model import CountsFlops, ForwardFlops, LayerRange
from drawloom.components.ports.pipeline import Loss
from drawloom.components.ports.run import Interval, Step
from drawloom.components.ports.stages import Stage, Stages
from drawloom.components.ports.tracking import Value
from drawloom.graph import Every
from drawloom.graph.testing import fake
from support.doubles import Machine
from support.metrics import combine


@attrs.frozen
class Counted:
    """A model with 10 operations by token and weight, and 100 and 1000 by pair, without a window and with one of 2."""

    def forward_flops(self, span: LayerRange | None = None) -> ForwardFlops:
        return ForwardFlops({"a.weight": 10.0, "b.weight": 10.0}, {None: 100.0, 2: 1000.0})


def make_metric(mesh: Any, kind: str = "cpu", models: int = 1, factor: float = 1.0, **settings: Any) -> Utilization:
    """Return the metric of a module whose second weight is frozen."""
    module = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False).requires_grad_(False)})
    stages = fake(Stages, local=[Stage(0, 1, LayerRange(0, 0, False, False), module)])
    precision = fake(Precision, compute=torch.bfloat16)
    every: Every[CountsFlops] = Every({str(number): Counted() for number in range(models)})
    feature = StageFeature()
    feature.peak_factor = factor  # type: ignore[misc]
    return Utilization(
        device=Machine(torch.device(kind)),
        mesh=mesh,
        precision=precision,
        stages=stages,
        loss=fake(Loss),
        models=every,
        features=Every({"feature": feature}),
        **settings,
    )


def values(metric: Utilization, ranks: int = 1) -> dict[str, Value]:
    """Measure a step over 2 seconds, with a row with two documents, 3 and 1 tokens long, on every rank."""
    ids = torch.tensor([[0, 0, 0, 1]])
    batch = TokenBatch(ids, ids, ids, ids, torch.ones(1, 4))
    batch = batch.evolve(padding=torch.tensor([[False, False, False, True]]))
    state = {"tokens": float(3 * ranks), "batches": [batch]}
    step = Step(1, 9, state, interval=Interval(10.0, 13.0, [(11.0, 12.0)]))
    parts = [metric.measure_on_rank(step) for _ in range(ranks)]
    return dict(metric.compute(combine(metric.accumulators, parts), step))


def test_operations_of_all_ranks_are_divided_by_seconds_ranks_and_peak(mesh_of: Any) -> None:
    """
    Operations count 3 by position and 2 for the frozen weight, and 3 by pair; two ranks have twice as many. Padding
    counts.
    """
    operations = 4 * (3 * 10 + 2 * 10) + 3 * (100 * 7 + 1000 * 6)
    for ranks in (1, 2):
        world = mock.Mock(size=ranks, rank=0)
        metric = make_metric(mesh_of(world=world), peak_tflops=1e-7)
        metric.open()
        expected: dict[str, Any] = {"tflops": operations / 2 / 1e12, "mfu": operations / 2 / 1e12 / 1e-7}
        if ranks == 2:
            expected["device_tokens_per_second"] = 1.5
        assert values(metric, ranks) == pytest.approx(expected)


def test_a_rate_above_the_peak_is_an_error_of_the_meter(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once and has no value; a feature may declare products that are twice as fast."""
    metric = make_metric(one_rank, peak_tflops=1e-8)
    metric.open()
    assert values(metric) == values(metric) == {"tflops": None, "mfu": None}
    [message] = caplog.messages
    assert "it measured 1.01 times the device's peak of 1e-08 TFLOP/s" in message
    rounded = make_metric(one_rank, peak_tflops=1e-8, factor=2.0)
    rounded.open()
    assert values(rounded)["mfu"] == pytest.approx(1.015)


def test_a_cpu_without_a_peak_has_no_utilization(one_rank: Any) -> None:
    """There is none with two models either, or without a model that counts FLOPs."""
    for metric in (
        make_metric(one_rank),
        make_metric(one_rank, models=2, peak_tflops=1.0),
        make_metric(one_rank, models=0, peak_tflops=1.0),
    ):
        metric.open()
        assert values(metric) == {} and not metric.accumulators


def test_a_gpu_has_the_peak_of_the_table_for_the_dtype_of_layers(one_rank: Any) -> None:
    """989.4 TFLOP/s in bfloat16 on an H100; a GPU missing from the table has TFLOP/s alone."""
    for name, peak in (("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA Unheard Of", None)):
        metric = make_metric(one_rank, "cuda")
        with mock.patch.object(torch.cuda, "get_device_name", return_value=name):
            metric.open()
        parts = [{"pairs": torch.tensor([7.0, 6.0])}]
        step = Step(1, 9, state={"tokens": float(4), "batches": []}, interval=Interval(0.0, 2.0))
        values = metric.compute(combine(metric.accumulators, parts), step)
        tflops = values["tflops"]
        assert isinstance(tflops, float)
        assert values.get("mfu") == (None if peak is None else pytest.approx(tflops / peak))
