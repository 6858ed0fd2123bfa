"""AdamW with stochastic rounding by parameter names."""

import copy
from math import prod
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import drawloom
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.optim.stochastic_adamw import StochasticAdamW, compute_flat_slice_layout
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import get_or_create_gradient
from drawloom.graph import UserError
from support.checkpoints import SingleRankMesh
from support.doubles import OneJob
from support.kernels import DEVICE
from support.steps import make_skipped_step
from support.weights import Weights

SHAPES = {"matrix": (4, 6), "vector": (6,)}


def narrow_weights(*names: str) -> Weights:
    """Return a bfloat16 matrix and vector to train, or one of them."""
    return Weights({name: SHAPES[name] for name in names or SHAPES}, torch.bfloat16, DEVICE)


def open_optimizer(weights: Weights, seed: int = 3, **settings: Any) -> StochasticAdamW:
    """Return an open optimizer."""
    kind: Any = DEVICE.type
    device: Any = ComputeDevice(kind=kind)
    settings = {"lr": 0.01, **settings}
    optimizer = StochasticAdamW(parameters=weights, mesh=SingleRankMesh(), job=OneJob(seed), device=device, **settings)
    optimizer.open()
    return optimizer


def after(steps: int, implementation: Any = "eager", **settings: Any) -> tuple[Weights, StochasticAdamW]:
    weights = narrow_weights()
    optimizer = open_optimizer(weights, implementation=implementation, **settings)
    for number in range(1, steps + 1):
        weights.give_gradients(number)
        optimizer.run_phase(Step(number, steps))
    return weights, optimizer


def same(one: Weights, other: Weights) -> bool:
    return all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True)
    )


@pytest.mark.parametrize(("state_dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_memory_covers_both_means(state_dtype: str, size: int) -> None:
    """They have their own dtype, and 24 elements for the matrix and 6 for the vector."""
    assert open_optimizer(narrow_weights(), state_dtype=state_dtype).device_bytes() == {
        "optimizer_state": 2 * size * (24 + 6)
    }


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}])
def test_float32_has_the_steps_of_torch(options: dict[str, bool]) -> None:
    """Float32 weights and state equal torch.optim.AdamW's with the same options."""
    ours, theirs = (Weights(SHAPES, torch.float32, DEVICE) for _ in range(2))
    optimizer = open_optimizer(ours, state_dtype="float32", weight_decay=0.0, **options)
    assert optimizer.device_bytes() == {"optimizer_state": (3 if "amsgrad" in options else 2) * 4 * (24 + 6)}
    torch_own = torch.optim.AdamW(theirs.parameters.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, **options)
    for number in range(1, 6):
        for weights in (ours, theirs):
            weights.give_gradients(number)
            for _, part in weights.named_parameters():
                assert part.grad is not None
                part.grad /= number**2  # smaller ones, after which the largest mean of squares stays
        optimizer.run_phase(Step(number, 5))
        torch_own.step()
    for name, part in theirs.named_parameters():
        torch.testing.assert_close(ours.parameters[name], part, rtol=1e-5, atol=1e-6)
        kept, expected = optimizer.state_dict()[name], torch_own.state[part]
        assert ("max_square" in kept) == ("max_exp_avg_sq" in expected)
        for key, field in (("mean", "exp_avg"), ("square", "exp_avg_sq"), ("max_square", "max_exp_avg_sq")):
            if key in kept:
                torch.testing.assert_close(kept[key], expected[field], rtol=1e-5, atol=1e-7)
        assert "amsgrad" not in options or (kept["max_square"] > kept["square"]).any()


def test_replicas_stay_equal_and_seeds_differ() -> None:
    """Replicas with the same seed get equal bits; another seed gives others."""
    assert same(after(5)[0], after(5)[0])
    assert not same(after(5)[0], after(5, seed=4)[0])


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}])
def test_triton_equals_eager_bitwise(options: dict[str, bool]) -> None:
    """Weights and state do not depend on the implementation."""
    (ours, mine), (theirs, their) = after(3, "triton", **options), after(3, "eager", **options)
    assert same(ours, theirs)
    for name, values in mine.state_dict().items():
        moments = values.keys() - {"steps"}
        assert len(moments) >= 2
        assert all(torch.equal(values[key], their.state_dict()[name][key]) for key in moments)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("means", ["bfloat16", "float32"])
def test_resuming_is_bit_exact(means: str, amsgrad: bool) -> None:
    """Steps after loading the state are bitwise equal to an uninterrupted optimizer's."""
    weights, first = after(3, state_dtype=means, amsgrad=amsgrad)
    others = narrow_weights()
    with torch.no_grad():
        for (_, target), (_, source) in zip(others.named_parameters(), weights.named_parameters(), strict=True):
            target.copy_(source)
    second = open_optimizer(others, state_dtype=means, amsgrad=amsgrad)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in (4, 5):
        for optimizer, side in ((first, weights), (second, others)):
            side.give_gradients(number)
            optimizer.run_phase(Step(number, 5))
    assert same(weights, others)


def test_noise_depends_on_the_parameter_name() -> None:
    """A parameter gets the same noise whichever other parameters a rank has."""
    alone = narrow_weights("matrix")
    optimizer = open_optimizer(alone, implementation="eager")
    alone.give_gradients(1)
    optimizer.run_phase(Step(1, 1))
    assert torch.equal(alone.parameters["matrix"], after(1)[0].parameters["matrix"])


def test_only_matrices_decay() -> None:
    """With zero gradients a matrix shrinks by lr times weight_decay, and a vector is unchanged."""
    weights = narrow_weights()
    before = {name: parameter.detach().clone() for name, parameter in weights.named_parameters()}
    open_optimizer(weights, lr=0.5, weight_decay=0.5).run_phase(Step(1, 1))
    assert torch.equal(weights.parameters["vector"], before["vector"])
    torch.testing.assert_close(weights.parameters["matrix"].detach(), before["matrix"] * 0.75, rtol=0.01, atol=0)


def test_a_skipped_step_only_clears_the_gradients() -> None:
    """A skipped step leaves weights, state and the next step's noise unchanged."""
    weights, optimizer = after(1)
    before, state = copy.deepcopy(weights), copy.deepcopy(optimizer.state_dict())
    weights.give_gradients(2)
    optimizer.run_phase(make_skipped_step(2, 2))
    assert same(weights, before)
    assert all(parameter.grad is None for _, parameter in weights.named_parameters())
    assert optimizer.state_dict()["matrix"]["steps"] == state["matrix"]["steps"] == 1


def test_lr_is_the_base_times_lr_factor() -> None:
    """The learning rate in use is in the step's outputs."""
    step = Step(1, 1, {"lr_factor": 0.25})
    open_optimizer(narrow_weights(), lr=0.1).run_phase(step)
    assert step.state["lr"] == pytest.approx(0.025)


def test_inconsistent_state_is_refused() -> None:
    """State for other parameters, or with different step counts, is an error naming them."""
    _, optimizer = after(1)
    with pytest.raises(KeyError, match="vector"):
        open_optimizer(narrow_weights()).load_state_dict({"matrix": {}})
    state = copy.deepcopy(optimizer.state_dict())
    state["vector"]["steps"] = 7
    with pytest.raises(ValueError, match=r"\[1, 7\]"):
        optimizer.load_state_dict(state)


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """implementation = 'triton' on a CPU without Triton's interpreter is a UserError."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(ComputeDevice, "device", torch.device("cpu"))
    with pytest.raises(UserError, match="implementation is 'triton', but Triton runs on GPUs"):
        open_optimizer(narrow_weights(), implementation="triton")


@given(st.data())
def test_rows_of_a_slice_have_their_index_in_the_whole(data: st.DataObject) -> None:
    """A tensor's box has the indices of its rows; one whose rows are not equally far apart is refused."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(data.draw(st.integers(1, length - at)) for length, at in zip(shape, offsets, strict=True))
    tensor_slice = TensorSlice(shape, offsets, size)
    expected = torch.arange(prod(shape)).view(shape)[tensor_slice.index()].flatten()
    elements = torch.arange(tensor_slice.numel)
    try:
        first, width, stride = compute_flat_slice_layout(tensor_slice)
    except UserError:
        begins = expected[torch.cat([torch.tensor([0]), (expected.diff() > 1).nonzero().flatten() + 1])]
        assert len({*begins.diff().tolist()}) > 1
    else:
        assert torch.equal(first + elements // width * stride + elements % width, expected)


def test_means_of_8_bits_train_like_float32_ones_and_take_a_quarter() -> None:
    """After 20 steps weights differ by less than a tenth of their change, and vectors keep float32 means."""
    shapes = {"matrix": (8, 300), "vector": (6,)}
    trained = {}
    for state_dtype in ("float32", "uint8"):
        weights = Weights(shapes, torch.bfloat16, DEVICE)
        optimizer = open_optimizer(weights, state_dtype=state_dtype, split_master_weights=True, weight_decay=0.0)
        before = weights.parameters["matrix"].detach().clone().float()
        for number in range(1, 21):
            weights.give_gradients(number % 3)
            optimizer.run_phase(Step(number, 20))
        trained[state_dtype] = weights.parameters["matrix"].detach().float() - before
    assert (trained["uint8"] - trained["float32"]).norm() < 0.1 * trained["float32"].norm()
    state = optimizer.state_dict()
    assert state["vector"]["mean"].dtype == torch.float32 and state["matrix"]["mean"].dtype == torch.uint8
    assert state["matrix.scales"]["mean"].shape == (8, 2)
    codes, scales, remainders, vector = 2 * 2400, 2 * 4 * 16, 2 * 2406, 2 * 4 * 6
    assert optimizer.device_bytes() == {"optimizer_state": codes + scales + remainders + vector}


def test_another_sharding_resumes_means_of_8_bits_exactly() -> None:
    """Two shards of rows, loaded from the whole state's slices, take the steps of the whole, bit for bit."""
    whole = Weights({"w": (6, 300)}, torch.bfloat16, DEVICE)
    first = open_optimizer(whole, state_dtype="uint8", implementation="eager")
    shards = [TensorSlice((6, 300), (start, 0), (3, 300)) for start in (0, 3)]
    for number in range(1, 4):
        if number == 3:
            saved, start = copy.deepcopy(first.state_dict()), whole.parameters["w"].detach().clone()
        whole.give_gradients(number)
        last_grad = get_or_create_gradient(whole.parameters["w"]).clone()
        first.run_phase(Step(number, 3))
    for shard in shards:
        part = Weights({"w": (3, 300)}, torch.bfloat16, DEVICE)
        part.parameter_slices = lambda shard=shard: {"w": shard}  # type: ignore[method-assign,misc]
        second = open_optimizer(part, state_dtype="uint8", implementation="eager")
        state: dict[str, Any] = {}
        for name, values in saved.items():
            slices = second.state_slices()[name]
            assert slices is not None
            rows = {key: value[slices.index()] for key, value in values.items() if isinstance(value, torch.Tensor)}
            state[name] = values | rows
        second.load_state_dict(state)
        with torch.no_grad():
            part.parameters["w"].copy_(start[shard.index()])
        part.parameters["w"].grad = last_grad[shard.index()]
        second.run_phase(Step(3, 3))
        assert torch.equal(part.parameters["w"], whole.parameters["w"][shard.index()])


def test_columns_that_cut_a_block_of_8_bits_are_refused() -> None:
    """The error names the parameter, its columns and the remedy."""
    weights = Weights({"w": (4, 150)}, torch.bfloat16, DEVICE)
    weights.parameter_slices = lambda: {"w": TensorSlice((4, 300), (0, 150), (4, 150))}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"w has columns 150 to 300 on one rank.* blocks of 256; .*bfloat16"):
        open_optimizer(weights, state_dtype="uint8")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("optimizer.state_dtype=uint8", "optimizer.amsgrad=true"), "the largest mean of squares can't have 8 bits"),
        (("optimizer.slot_bytes=100",), "nothing is streamed through slots"),
        (("optimizer.split_master_weights=true", "precision.parameter=float32"), "weights in float32 are not split"),
        (
            ("optimizer.state_dtype=uint8", "mesh.tensor=2", "model.intermediate_size=1024"),
            "o_proj.weight has columns 0 to 96 on one rank along tensor, and means of 8 bits have blocks of 256",
        ),
    ],
)
def test_settings_that_can_not_work_together_are_refused(words: tuple[str, ...], text: str) -> None:
    """Each conflict is one problem of the recipe."""
    common = ("optimizer.use=optim.stochastic_adamw", "optimizer.lr=0.01", "precision.parameter=bfloat16")
    problems = drawloom.Recipe.load("first_run", *common, *words).graph.problems
    assert [text in str(problem) for problem in problems] == [True]


def test_ranks_with_whole_blocks_of_8_bits_are_allowed() -> None:
    """512 columns on two ranks have whole blocks."""
    words = ("optimizer.use=optim.stochastic_adamw", "optimizer.lr=0.01", "precision.parameter=bfloat16")
    sizes = ("model.num_attention_heads=16", "model.head_dim=32", "model.intermediate_size=1024", "mesh.tensor=2")
    assert not drawloom.Recipe.load("first_run", *words, *sizes, "optimizer.state_dtype=uint8").graph.problems
