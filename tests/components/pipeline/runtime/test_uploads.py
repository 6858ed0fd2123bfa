"""The order of uploads to a GPU, with streams that record their calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.pipeline.runtime.uploads import Uploads
from drawloom.components.ports.data import TokenBatch
from drawloom.components.state.trees import list_leaves
from support.clips import Clips, clips


@attrs.define
class Stream:
    """A stream with a name and a common record of calls."""

    name: str
    seen: list[str]

    def wait_stream(self, other: "Stream") -> None:
        self.seen.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls to streams and tensors, on a device that is neither CPU nor GPU."""
    calls: list[str] = []
    inside = ["compute"]

    @contextmanager
    def enter_stream(stream: Stream) -> Iterator[None]:
        inside.append(stream.name)
        yield
        inside.pop()

    def record_pin(tensor: Tensor) -> Tensor:
        calls.append("pin")
        return tensor.clone()

    def record_copy(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append(f"copy in {inside[-1]}{'' if non_blocking else ', and wait'}")
        return torch.empty_like(tensor, device=device)

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("compute", calls))
    monkeypatch.setattr(torch.cuda, "stream", enter_stream)
    monkeypatch.setattr(Tensor, "pin_memory", record_pin)
    monkeypatch.setattr(Tensor, "to", record_copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: calls.append(f"kept for {stream.name}"))
    return calls


def test_copies_have_a_stream_that_waits_for_nothing(seen: list[str]) -> None:
    """Copies from pinned memory wait for nothing, computation waits for them, and memory is kept until it is read."""
    uploads = Uploads(torch.device("meta"))
    batch = TokenBatch(*(torch.ones(2, 3) for _ in range(5)))
    for _ in range(2):
        there = uploads.start_upload(batch)
        assert all(leaf.device.type == "meta" for leaf in list_leaves(there) if isinstance(leaf, Tensor))
        assert seen == [*["pin", "copy in copies"] * 5, "compute waits for copies", *["kept for compute"] * 5]
        seen.clear()


def test_tensors_on_the_device_are_not_copied(seen: list[str]) -> None:
    """A tensor on the device and values other than tensors pass unchanged."""
    there = torch.empty(2, device="meta")
    assert Uploads(torch.device("meta")).start_upload([there, 3, None]) == [there, 3, None]
    assert not [call for call in seen if "copy" in call]


def test_every_tensor_of_an_own_batch_is_copied(seen: list[str]) -> None:
    """Trees as well; numbers of the host stay."""
    there = Uploads(torch.device("meta")).start_upload(clips())
    assert isinstance(there, Clips) and all(tensor.is_meta for tensor in there.tensors()) and there.skipped == 4
    assert seen.count("copy in copies") == 5
