"""A thread that notices when something takes too long."""

import threading

import attrs

from drawloom.components.listeners.watchdog import Watchdog


@attrs.define
class Hands:
    """A clock that a test turns."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def _dog(hands: Hands) -> tuple[Watchdog, list[float]]:
    expired: list[float] = []
    return Watchdog(expired.append, tick=1.0, clock=hands), expired


def _pass(dog: Watchdog, hands: Hands, seconds: int) -> None:
    for _ in range(seconds):
        hands.now += 1.0
        dog.look()


def test_time_that_is_up_is_told_once() -> None:
    """Allowed 5 seconds, it is quiet after 4 and expires at 5, with the limit, and not again."""
    hands = Hands()
    dog, expired = _dog(hands)
    dog.allow(5)
    _pass(dog, hands, 4)
    assert expired == []
    _pass(dog, hands, 9)
    assert expired == [5]


def test_a_new_limit_counts_from_the_start() -> None:
    """What took 4 of 5 seconds leaves nothing behind for what comes next."""
    hands = Hands()
    dog, expired = _dog(hands)
    for _ in range(3):
        dog.allow(5)
        _pass(dog, hands, 4)
    assert expired == []


def test_without_a_limit_nothing_expires() -> None:
    """Before the first limit, and after it was lifted."""
    hands = Hands()
    dog, expired = _dog(hands)
    _pass(dog, hands, 100)
    dog.allow(5)
    dog.allow(None)
    _pass(dog, hands, 100)
    assert expired == []


def test_a_suspended_process_does_not_hang() -> None:
    """An hour between two looks, in which nobody could have worked, counts as two seconds."""
    hands = Hands()
    dog, expired = _dog(hands)
    dog.allow(5)
    hands.now += 3600
    dog.look()
    _pass(dog, hands, 2)
    assert expired == []
    _pass(dog, hands, 1)
    assert expired == [5]


def test_the_thread_looks_by_itself_and_ends() -> None:
    """With real time: it expires while this thread waits, and is gone after stop."""
    barked = threading.Event()
    dog = Watchdog(lambda _: barked.set(), tick=0.01)
    dog.start()
    dog.allow(0.05)
    assert barked.wait(10)
    dog.stop()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_what_is_slow_is_told_once_too() -> None:
    """For each thing that is allowed time, when it is told to, and not after it expired."""
    hands, slow = Hands(), list[float]()
    dog = Watchdog(lambda _limit: None, tick=1.0, clock=hands, slow=slow.append)
    for _ in range(2):
        dog.allow(8, slow=4)
        _pass(dog, hands, 3)
        assert slow in ([], [8])
        _pass(dog, hands, 3)
    assert slow == [8, 8]
    dog.allow(8)
    _pass(dog, hands, 30)
    dog.allow(None)
    _pass(dog, hands, 30)
    assert slow == [8, 8]
