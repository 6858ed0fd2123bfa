"""The progress of tokenizing: bytes, tokens per second, and the time that is left."""

import time
from collections.abc import Callable, Mapping

import attrs


@attrs.define
class Progress:
    """
    Counts what was read of each part, and says so every `interval` seconds.

    sizes: bytes by number of the part, of those that are not complete yet; `complete` bytes were there before.
    """

    sizes: Mapping[int, int]
    complete: int
    say: Callable[[str], None]
    interval: float
    clock: Callable[[], float] = time.monotonic
    _read: dict[int, int] = attrs.field(init=False, factory=dict)
    _tokens: int = attrs.field(init=False, default=0)
    _started: float = attrs.field(init=False)
    _said: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._started = self._said = self.clock()

    def add(self, part: int, read: int, tokens: int) -> None:
        """Count a batch; a part never has more than its size, although characters and bytes differ."""
        self._read[part] = min(self._read.get(part, 0) + read, self.sizes[part])
        self._tokens += tokens
        self.show()

    def finish(self, part: int) -> None:
        """Count a part as read."""
        self._read[part] = self.sizes[part]

    def show(self) -> None:
        """Say how far it is, if it is time to."""
        if self.clock() - self._said >= self.interval:
            self._said = self.clock()
            self.say(str(self))

    def __str__(self) -> str:
        read, total = sum(self._read.values()), sum(self.sizes.values())
        seconds = max(self.clock() - self._started, 1e-9)
        percent = 100 * (self.complete + read) / max(self.complete + total, 1)
        rate = f"{self._tokens / seconds / 1e6:.2f} M tokens/s"
        left = f", {duration((total - read) * seconds / read)} left" if read else ""
        share = f"{megabytes(self.complete + read)} of {megabytes(self.complete + total)} ({percent:.0f} %)"
        return f"tokenized {share}, {rate}{left}"


def megabytes(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def duration(seconds: float) -> str:
    """A time span for people."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
