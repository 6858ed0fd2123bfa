"""Philox against the known answers of its authors, and the evenness of its bits."""

import torch

from drawloom.kernels.philox import philox

ALL = 2**64 - 1


def words(key: int, index: int, counter: int) -> list[str]:
    return [f"{word.item():08x}" for word in philox(key, torch.tensor([index]), counter)]


def test_known_answers() -> None:
    """The vectors that Random123 publishes for Philox-4x32-10."""
    assert words(0, 0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words(ALL, -1, ALL) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    key, index, counter = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E
    signed = index - 2**64
    assert words(key, signed, counter) == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


def test_every_bit_is_even() -> None:
    """Over many indices each of the 128 bits is set half of the time, to five standard deviations."""
    drawn = torch.stack(philox(7, torch.arange(40_000), 3))
    shares = torch.stack([(drawn >> bit & 1).double().mean(1) for bit in range(32)])
    assert ((shares - 0.5).abs() < 5 * 0.5 / 200).all()


def test_key_index_and_counter_all_count() -> None:
    """A change in any one of them, in its upper half too, changes the words."""
    different = {tuple(words(*arguments)) for arguments in PLACES}
    assert len(different) == len(PLACES)


PLACES = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**32)]
