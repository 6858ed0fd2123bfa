"""Memory that is reused from one copy to the next."""

import gc
import threading

import torch

from drawloom.components.checkpoint.staging.pinned_pool import ALIGNED, Pool


def _place(pool: Pool, size: int) -> tuple[int, torch.Tensor]:
    """A tensor of this many bytes in its own buffer, and its address."""
    [tensor] = pool.tensors([size])
    return tensor.data_ptr(), tensor


def test_parts_are_separate_aligned_and_of_their_size() -> None:
    """Each has a separate storage of its size; writing to one changes no other."""
    parts = Pool().tensors([1, 64, 65, 100])
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]
    assert [part.untyped_storage().nbytes() for part in parts] == [1, 64, 65, 100]
    assert not any(part.data_ptr() % ALIGNED for part in parts)


def test_memory_is_reused_after_the_last_tensor_is_freed() -> None:
    """Not earlier: a view of a view holds the buffer as well."""
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
    assert pool.tensors([]) == []
    assert len(pool._unused) == 1
    assert len({_place(pool, 5000)[0] for _ in range(3)}) == 1


def test_all_tensors_of_a_copy_hold_one_buffer() -> None:
    """It becomes unused when the last tensor is freed, in any order."""
    pool = Pool()
    first, second = pool.tensors([5000, 5000])
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
            pool.clear()
        tensors.clear()
        gc.collect()
        assert len(pool._unused) == (0 if clear else kept)


def test_buffers_of_another_size_are_dropped() -> None:
    """A state that grew or shrank by far does not keep its old memory."""
    pool = Pool()
    _place(pool, 4_000_000)
    for size in (100, 9_000_000):
        _place(pool, size)
        assert len(pool._unused) == 1


def test_buffers_freed_in_many_threads_return_once() -> None:
    """Tensors that are freed in many threads at once return every buffer exactly once."""
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
