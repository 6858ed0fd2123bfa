"""Allocating a CPU copy of a state, and listing the copies to make."""

import gc
import threading
from collections import OrderedDict
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from drawloom.components.checkpoint.staging.copy_plan import ALIGNMENT, Pool, plan_copies

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


def stage_and_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return the staged state with all copies made."""
    staged, copies = plan_copies(state, Pool())
    for copy in copies:
        copy.copy_tensor()
    return staged


def count_copied_bytes(state: dict[str, Any]) -> int:
    """Return the number of bytes copied for a state."""
    return sum(copy.target.nbytes for copy in plan_copies(state, Pool())[1])


@st.composite
def _views(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    whole = torch.arange(torch.Size(shape).numel() or 1).remainder(7).to(dtype)
    tensor = whole[: torch.Size(shape).numel()].reshape(shape)
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        dimension = draw(st.integers(0, len(shape) - 1))
        change = draw(st.sampled_from(["transpose", "slice", "expand", "step"]))
        if change == "transpose":
            tensor = tensor.transpose(0, dimension)
        elif change == "slice":
            tensor = tensor.narrow(dimension, 0, max(tensor.shape[dimension] - 1, 0))
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
        else:
            tensor = tensor[tuple([slice(None)] * dimension + [slice(None, None, 2)])]
    return tensor


@hypothesis.given(st.lists(_views(), max_size=5))
def test_every_view_is_copied_bit_by_bit(tensors: list[Tensor]) -> None:
    """For any shape, stride and dtype the copy is equal, and shares no memory with the state."""
    state = {str(number): tensor for number, tensor in enumerate(tensors)}
    staged = stage_and_copy(state)
    for name, tensor in state.items():
        assert (staged[name].dtype, staged[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(staged[name], tensor)
        expected = staged[name].clone()
        if tensor.numel():
            tensor.untyped_storage().copy_(
                torch.ones(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
            )
        assert torch.equal(staged[name], expected)


def test_ties_are_kept() -> None:
    """Equal views on the same memory share it in the copy, and are copied once; other views are copied separately."""
    table = torch.arange(100.0)
    state = {"whole": table, "tied": table, "deep": {"middle": table[20:60]}, "columns": table.view(10, 10).T}
    staged = stage_and_copy(state)
    staged["deep"]["middle"][0] = staged["columns"][0, 0] = -1
    assert torch.equal(staged["whole"], table)
    assert staged["whole"].data_ptr() == staged["tied"].data_ptr()
    assert count_copied_bytes(state) == 400 + 160 + 400


def test_the_layout_is_kept() -> None:
    """A transposed matrix is copied without reordering its elements; a view with gaps becomes contiguous."""
    table = torch.zeros(10, 20)
    staged = stage_and_copy({"transposed": table.T, "columns": table[:, 3:8]})
    assert staged["transposed"].stride() == (1, 20)
    assert staged["columns"].is_contiguous()


@pytest.mark.parametrize(
    ("state", "most"),
    [
        ({"view": torch.zeros(2**20)[5:6]}, 32),
        ({"a": torch.zeros(2**20)[:10], "b": torch.zeros(2**20)[-10:]}, 128),
        ({"column": torch.zeros(1000, 1000)[:, 3]}, 4000),
        ({"columns": torch.zeros(1000, 1000)[:, 3:8], "same": torch.zeros(1000, 1000)[:, 3:8]}, 40000),
    ],
)
def test_small_views_are_copied_at_their_size(state: dict[str, Any], most: int) -> None:
    """A small view is copied without the rest of its storage."""
    assert count_copied_bytes(state) <= most
    assert all(torch.equal(tensor, state[name]) for name, tensor in stage_and_copy(state).items())


def test_plain_values_and_containers_are_copied() -> None:
    """Later changes in the state do not change the copy; values keep their types."""
    state: dict[Any, Any] = {"a": [1, {"b": 2.5}], "c": (True, None), "d": OrderedDict(e="f"), "g": b"h", 3: 1j}
    staged = stage_and_copy(state)
    state["a"][1]["b"] = 0
    assert staged == {"a": [1, {"b": 2.5}], "c": (True, None), "d": {"e": "f"}, "g": b"h", 3: 1j}


def test_parameters_become_tensors() -> None:
    """Copies have no autograd history and keep no graph alive."""
    weight = torch.nn.Parameter(torch.ones(3)) * 2
    staged = stage_and_copy({"weight": weight})["weight"]
    assert type(staged) is Tensor and not staged.requires_grad and torch.equal(staged, weight)


def test_unknown_values_are_refused_with_their_path() -> None:
    """A value that a checkpoint has no form for raises with its path."""
    with pytest.raises(TypeError, match=r"^a/0/b is a set, which can't be staged$"):
        stage_and_copy({"a": [{"b": {1}}]})


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_sparse_and_meta_tensors_are_refused(tensor: Tensor) -> None:
    """Tensors without a strided storage raise with their path."""
    with pytest.raises(TypeError, match=r"^a is a torch.*, which can't be staged; save a dense"):
        stage_and_copy({"a": tensor})


def test_a_wrapper_keeps_its_parts_and_its_shape() -> None:
    """A wrapper with shape and strides from its parts has the state's layout and values."""
    parts = torch.arange(6.0).view(3, 2).T, torch.ones(3, 2).T
    wrapper: Any = TwoTensor
    staged = stage_and_copy({"pair": wrapper(*parts)})["pair"]
    assert type(staged) is TwoTensor and (staged.shape, staged.stride()) == ((2, 3), (1, 2))
    assert torch.equal(staged.a, parts[0]) and torch.equal(staged.b, parts[1])


def test_a_dtensor_stays_a_dtensor() -> None:
    """Its local shard is copied; mesh, placements and global shape are the same."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(6.0).reshape(2, 3)
        for placement in (Shard(0), Replicate()):
            tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
            staged = stage_and_copy({"a": tensor})["a"]
            assert isinstance(staged, DTensor)
            assert (staged.shape, staged.placements, staged.device_mesh) == (tensor.shape, tensor.placements, mesh)
            assert torch.equal(staged.to_local(), local)
            assert staged.to_local().data_ptr() != local.data_ptr()
    finally:
        torch.distributed.destroy_process_group()


def _place(pool: Pool, size: int) -> tuple[int, torch.Tensor]:
    """Return a tensor of this many bytes in its own buffer, and its address."""
    [tensor] = pool.allocate_tensors([size])
    return tensor.data_ptr(), tensor


def test_parts_are_separate_aligned_and_of_their_size() -> None:
    """Parts have separate storages of their own size; writing to one changes no other."""
    parts = Pool().allocate_tensors([1, 64, 65, 100])
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]
    assert [part.untyped_storage().nbytes() for part in parts] == [1, 64, 65, 100]
    assert not any(part.data_ptr() % ALIGNMENT for part in parts)


def test_memory_is_reused_after_the_last_tensor_is_freed() -> None:
    """Memory is not reused earlier: a view of a view holds the buffer as well."""
    pool = Pool()
    first, tensor = _place(pool, 5000)
    view = tensor.view(torch.float32)[10:20].reshape(2, 5).T
    del tensor
    second, other = _place(pool, 5000)
    assert second != first
    view.fill_(3)
    del view
    third, _ = _place(pool, 5000)
    assert third == first
    assert other.numel() == 5000


def test_an_empty_state_takes_no_buffer() -> None:
    """A state without tensors does not take a buffer from the next one."""
    pool = Pool()
    assert pool.allocate_tensors([]) == []
    assert len(pool._unused) == 1
    assert len({_place(pool, 5000)[0] for _ in range(3)}) == 1


def test_all_tensors_of_a_copy_hold_one_buffer() -> None:
    """It becomes unused when the last tensor is freed, in any order."""
    pool = Pool()
    first, second = pool.allocate_tensors([5000, 5000])
    del first
    assert not pool._unused
    del second
    assert len(pool._unused) == 1


def test_a_pool_keeps_at_most_its_limit() -> None:
    """It keeps two unused buffers, and none after clear or with kept = 0."""
    for kept, clear in ((2, False), (0, False), (2, True)):
        pool = Pool(kept=kept)
        tensors = [_place(pool, 3_000_000)[1] for _ in range(5)]
        if clear:
            pool.free_and_stop_pooling()
        tensors.clear()
        gc.collect()
        assert len(pool._unused) == (0 if clear else kept)


def test_buffers_of_another_size_are_dropped() -> None:
    """If a state grows or shrinks by far, its old memory is dropped."""
    pool = Pool()
    _place(pool, 4_000_000)
    for size in (100, 9_000_000):
        _place(pool, size)
        assert len(pool._unused) == 1


def test_buffers_freed_in_many_threads_return_once() -> None:
    """Tensors freed in many threads at once return every buffer exactly once."""
    pool = Pool(kept=100)

    def work() -> None:
        for _ in range(200):
            _place(pool, 100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(buffer) for buffer in pool._unused}) == len(pool._unused) <= 4
