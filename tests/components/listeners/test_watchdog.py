"""The watchdog thread."""

import threading

from drawloom.components.listeners.watchdog import Watchdog
from support.doubles import FakeClock


def _dog(hands: FakeClock) -> tuple[Watchdog, list[float]]:
    expired: list[float] = []
    return Watchdog(expired.append, poll_seconds=1.0, clock=hands), expired


def _pass(dog: Watchdog, hands: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        hands.now += 1.0
        dog.check_limit()


def test_expiry_is_reported_once() -> None:
    """With a limit of 5 seconds nothing is called at 4; `expired` is called at 5, and not again."""
    hands = FakeClock()
    dog, expired = _dog(hands)
    dog.start_limit(5)
    _pass(dog, hands, 4)
    assert expired == []
    _pass(dog, hands, 9)
    assert expired == [5]


def test_a_new_limit_starts_anew() -> None:
    """Time spent under an earlier limit does not count."""
    hands = FakeClock()
    dog, expired = _dog(hands)
    for _ in range(3):
        dog.start_limit(5)
        _pass(dog, hands, 4)
    assert expired == []


def test_without_a_limit_nothing_expires() -> None:
    """Nothing is called before the first limit, and after it is lifted."""
    hands = FakeClock()
    dog, expired = _dog(hands)
    _pass(dog, hands, 100)
    dog.start_limit(5)
    dog.start_limit(None)
    _pass(dog, hands, 100)
    assert expired == []


def test_suspension_does_not_count_as_a_hang() -> None:
    """An hour between two polls counts as two ticks."""
    hands = FakeClock()
    dog, expired = _dog(hands)
    dog.start_limit(5)
    hands.now += 3600
    dog.check_limit()
    _pass(dog, hands, 2)
    assert expired == []
    _pass(dog, hands, 1)
    assert expired == [5]


def test_the_thread_polls_and_ends() -> None:
    """With a real clock it expires while this thread waits, and the thread is gone after stop."""
    barked = threading.Event()
    dog = Watchdog(lambda _: barked.set(), poll_seconds=0.01)
    dog.start()
    dog.start_limit(0.05)
    assert barked.wait(10)
    dog.stop()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_slowness_is_reported_once() -> None:
    """`slow` is called once for every limit with a threshold, and not after the limit expired."""
    hands, slow = FakeClock(), list[float]()
    dog = Watchdog(lambda _limit: None, poll_seconds=1.0, clock=hands, on_slow=slow.append)
    for _ in range(2):
        dog.start_limit(8, slow_after_seconds=4)
        _pass(dog, hands, 3)
        assert slow in ([], [8])
        _pass(dog, hands, 3)
    assert slow == [8, 8]
    dog.start_limit(8)
    _pass(dog, hands, 30)
    dog.start_limit(None)
    _pass(dog, hands, 30)
    assert slow == [8, 8]
