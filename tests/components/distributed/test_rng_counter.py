"""Counter-based normal numbers: their bits, their distribution, and the equality of slices with the whole."""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.distributed import rng
from drawloom.components.distributed.rng import convert_bits_to_normal, draw_splitmix64_bits, fill_normal

KEYS = st.integers(0, 2**64 - 1)


def draw_normal(*shape: int, key: int = 5, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a whole tensor of normal numbers, float32 unless given."""
    tensor = torch.empty(shape, dtype=dtype)
    fill_normal(tensor, key, std)
    return tensor


def mix_bits(state: int) -> int:
    """SplitMix64's output function, in Python's unbounded integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


@given(KEYS, st.integers(0, 2**62))
def test_bits_equal_splitmix64(key: int, index: int) -> None:
    """Bits equal SplitMix64's, computed in exact integers."""
    expected = mix_bits((key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert draw_splitmix64_bits(key, torch.tensor([index])).item() % 2**64 == expected


def test_bits_equal_the_published_sequence() -> None:
    """The first numbers from seed 1234567 equal other implementations' numbers."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [bits % 2**64 for bits in draw_splitmix64_bits(1234567, torch.arange(3)).tolist()] == expected


def test_numbers_never_change() -> None:
    """The first numbers and a checksum over many are fixed: initial weights in every later version depend on them."""
    numbers = draw_normal(300, 200, key=7, std=0.02)
    assert (
        hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
        == "433649972f9fa12507186553b8c78af6e324a462bc0d339f941ae6730f414975"
    )


def test_quantiles_equal_the_normal_distribution() -> None:
    """Every quantile, out to the most extreme, is right to 4e-6 of its size, and opposite bits give opposite signs."""
    places = [*range(-(2**52), 2**52, 2**43), *(-(2**52) + 2**n for n in range(43)), -(2**52), -1]
    bits = torch.tensor([position << 11 for position in places])
    quantiles = convert_bits_to_normal(bits).tolist()
    expected = [NormalDist().inv_cdf((position + 0.5) * 2.0**-53 + 0.5) for position in places]
    assert quantiles == pytest.approx(expected, rel=4e-6, abs=1e-12)
    assert min(quantiles) < -8.2
    assert convert_bits_to_normal(~bits).tolist() == [-number for number in quantiles]


@pytest.fixture(scope="module")
def many() -> Tensor:
    """Return two million numbers, in float64."""
    return draw_normal(1024, 2048, key=3).double()


def test_moments_are_normal(many: Tensor) -> None:
    """The first six moments are within four standard errors of a normal distribution's."""
    for power, moment in enumerate((0, 1, 0, 3, 0, 15), 1):
        error = math.sqrt((math.prod(range(2 * power - 1, 0, -2)) - moment**2) / many.numel())
        assert abs((many**power).mean() - moment) < 4 * error, power


@pytest.mark.parametrize("key", range(4))
def test_the_distribution_passes_kolmogorov_smirnov(key: int) -> None:
    """Chance exceeds the bound on the distance to the normal distribution once in 10,000 times."""
    numbers = draw_normal(2**18, key=key).double().sort().values
    count = numbers.numel()
    cdf, steps = torch.special.ndtr(numbers), torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((cdf - steps[:-1]).abs().max(), (cdf - steps[1:]).abs().max())
    assert distance * math.sqrt(count) < 2.23


@pytest.mark.parametrize("bound", [1.0, 1.4395, 2.0, 3.0, 4.0, 4.5])
def test_tails_are_normal(many: Tensor, bound: float) -> None:
    """The count beyond each bound, on either side, is as expected; 1.4395 is where the two formulas meet."""
    expected = many.numel() * (1 - NormalDist().cdf(bound))
    for beyond in (many > bound, many < -bound):
        assert abs(int(beyond.sum()) - expected) < 4 * math.sqrt(expected)


def correlation(x: Tensor, y: Tensor) -> float:
    """Return two tensors' correlation, in standard errors around 0."""
    x, y = x.flatten() - x.mean(), y.flatten() - y.mean()
    return float((x @ y) / (x.norm() * y.norm())) * math.sqrt(x.numel())


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 64, 2047, 2048, 2049, 65536])
def test_neighbours_are_independent(many: Tensor, lag: int) -> None:
    """Neither numbers, nor their squares, nor their signs correlate with the numbers `lag` elements later."""
    flat = many.flatten()
    for numbers in (flat, flat**2, flat.sign(), (flat.abs() > 2).double()):
        assert abs(correlation(numbers[:-lag], numbers[lag:])) < 4.5


def test_parameters_are_independent() -> None:
    """Tensors with different keys do not correlate, even if the keys differ by one bit or by one step."""
    first = draw_normal(512, 512, key=12345).double()
    keys = [12345 ^ 1 << bit for bit in range(0, 64, 5)] + [12346, 12345 + 2**63, ~12345 % 2**64]
    for key in keys:
        other = draw_normal(512, 512, key=key).double()
        for x, y in ((first, other), (first**2, other**2), (first, other.roll(1, 1)), (first[:-1], other[1:])):
            assert abs(correlation(x, y)) < 4.5, key


def test_pairs_fill_the_square(many: Tensor) -> None:
    """Neighbouring pairs are evenly distributed over the 32 x 32 cells of their quantiles (chi-square, four sigma)."""
    cells = (torch.special.ndtr(many.flatten()) * 32).long().clamp(0, 31).view(-1, 2)
    counts = (cells[:, 0] * 32 + cells[:, 1]).bincount(minlength=1024).double()
    expected = counts.sum() / 1024
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1023) < 4 * math.sqrt(2 * 1023)


@given(st.data())
def test_a_slice_has_the_numbers_of_the_whole(data: st.DataObject) -> None:
    """A tensor's slice, with any strides and cut into any chunks, equals the same part of the whole."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    key, whole = data.draw(KEYS), torch.empty(shape)
    fill_normal(whole, key, 0.5)
    offsets = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - first)) for size, first in zip(shape, offsets, strict=True)]
    part = torch.empty(sizes[::-1]).permute(*reversed(range(len(sizes))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "CPU_CHUNK", data.draw(st.integers(1, 20)))
        fill_normal(part, key, 0.5, shape, offsets)
    expected = whole
    for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        expected = expected.narrow(dim, first, size)
    assert torch.equal(part, expected)


def test_memory_does_not_grow_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one chunk is computed at a time, along any long dimension."""
    sizes: list[int] = []

    def record_bits(bits: Tensor) -> Tensor:
        sizes.append(bits.numel())
        return convert_bits_to_normal(bits)

    monkeypatch.setattr(rng, "convert_bits_to_normal", record_bits)
    for shape in ((300_000,), (1, 300_000), (300_000, 1), (3, 1, 100_000), (100, 3000)):
        sizes.clear()
        draw_normal(*shape)
        assert sum(sizes) == 300_000 and max(sizes) <= rng.CPU_CHUNK


def test_elements_beyond_two_billion_differ() -> None:
    """Indices have 64 bits: elements 2^32 apart have different numbers, and a slice far out is filled."""
    parts = torch.empty(2, 1, 8)
    for part, row in zip(parts, (0, 2**30), strict=True):
        fill_normal(part, 1, 1.0, shape=(2**30 + 1, 8), offsets=(row, 0))
    assert not torch.isclose(parts[0], parts[1]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_hold_the_float32_numbers(dtype: torch.dtype) -> None:
    """All dtypes have the float32 numbers, rounded where necessary."""
    assert torch.equal(draw_normal(50, 7, std=0.02, dtype=dtype), draw_normal(50, 7, std=0.02).to(dtype))


@pytest.mark.parametrize(
    ("shape", "offsets"), [((4, 4), (3, 0)), ((4, 4), (0, -1)), ((4,), (0,)), ((4, 4, 4), (0, 0, 0))]
)
def test_a_slice_outside_its_tensor_is_refused(shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """A slice is an error if it ends beyond the tensor, begins before it or has other dimensions."""
    with pytest.raises(ValueError, match="is not inside a tensor of shape"):
        fill_normal(torch.empty(2, 2), 0, 1.0, shape, offsets)


def test_torchs_generator_is_not_used() -> None:
    """The numbers do not depend on torch's seed, and its generator is not advanced."""
    torch.manual_seed(1)
    first, state = draw_normal(8), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, draw_normal(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_are_equal_on_cpu_and_gpu(dtype: torch.dtype) -> None:
    """A GPU computes the CPU's bits: for 64 million numbers, with tails out to 5.7, and for a slice."""
    shape, sizes, offsets = (8192, 8192), (1000, 77), (5000, 3)
    for part, options in (
        (torch.empty(shape, dtype=dtype), {}),
        (torch.empty(sizes, dtype=dtype), {"offsets": offsets}),
    ):
        on_gpu = part.cuda()
        for tensor in (part, on_gpu):
            fill_normal(tensor, 11, 0.02, shape, **options)
        assert torch.equal(on_gpu.cpu(), part)
