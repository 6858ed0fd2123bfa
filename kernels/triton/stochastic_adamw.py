"""
AdamW with stochastic rounding in Triton: one launch for all weights of the same dtypes.

A table on the device says where each weight, its gradient and its means lie; another, which weight and which part of
it each program takes. What changes by step is in two small tensors on the device, so that a launch can be recorded in
a graph and run again. Nothing is contracted into fused multiply-adds, and division and root are rounded as IEEE 754
says: the eager twin gives the same bits.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.stochastic_adamw import Trained
from drawloom.kernels.triton.primitives import halves, round_stochastically, words

PART = 2**14
"""Elements that a program takes."""

BLOCK = 512
"""Of these it holds so many at once: 4 a thread, 8 bytes of bfloat16; of more there would be too few programs."""

ALIGNMENT = 16
"""Bytes that are read together; what lies otherwise is read element by element."""

COLUMNS = 7
"""Numbers in a row of the table: four addresses, the count of elements, key and first place of the noise."""


class StochasticAdamwTriton:
    """Takes steps with one launch for each combination of dtypes; the eager twin does the same, to the bit."""

    def __init__(self, trained: Sequence[Trained]) -> None:
        kinds = sorted(range(len(trained)), key=lambda place: _kind(trained[place]))
        groups = groupby(kinds, key=lambda place: _kind(trained[place]))
        self._launches = [(places, _Launch([trained[p] for p in places])) for places in (list(g) for _, g in groups)]

    def step(self, gradients: Sequence[Tensor], numbers: tuple[float, ...], counter: int) -> None:
        """Change all weights and means in place; gradients are in the order of the weights."""
        for places, launch in self._launches:
            launch.set(numbers, counter)
            launch.run([gradients[place] for place in places])


def _kind(trained: Trained) -> tuple[str, ...]:
    """What weights of one launch have in common."""
    tensors = trained.weight, trained.mean, trained.square
    aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    return str(trained.weight.dtype), str(trained.mean.dtype), str(trained.weight.device), str(aligned)


class _Launch:
    """Weights of one kind, and the tables that lead to them."""

    def __init__(self, trained: list[Trained]) -> None:
        if any(not x.is_contiguous() for t in trained for x in (t.weight, t.mean, t.square)):
            raise ValueError("weights and running means must be contiguous; use the eager twin for others")
        self._trained = [t for t in trained if t.weight.numel()]
        self._places = [place for place, t in enumerate(trained) if t.weight.numel()]
        self._device = trained[0].weight.device
        self._aligned = _kind(trained[0])[-1] == str(True)
        parts = [(row, part) for row, t in enumerate(self._trained) for part in range(-(-t.weight.numel() // PART))]
        self._parts = torch.tensor(parts, dtype=torch.int32).to(self._device)
        self._decays = torch.tensor([t.decay for t in self._trained], dtype=torch.float32).to(self._device)
        self._numbers = torch.zeros(6, dtype=torch.float32, device=self._device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._addresses: list[int] = []
        self._table = torch.empty(0)

    def set(self, numbers: tuple[float, ...], counter: int) -> None:
        """What the next runs compute with."""
        self._numbers.copy_(_sent(torch.tensor(numbers, dtype=torch.float32), self._device), non_blocking=True)
        self._counter.copy_(_sent(torch.tensor([counter]), self._device), non_blocking=True)

    def run(self, gradients: list[Tensor]) -> None:
        """One launch for each dtype of gradients; tables are written anew where gradients have moved."""
        if not self._trained:
            return
        gradients = [_readable(gradients[place]) for place in self._places]
        dtypes = {gradient.dtype for gradient in gradients}
        if len(dtypes) > 1:
            gradients = [gradient.float() for gradient in gradients]
        self._find(gradients)
        one = self._trained[0]
        _kernel[(len(self._parts),)](
            self._table,
            self._parts,
            self._decays,
            self._numbers,
            self._counter,
            one.weight[:0],
            gradients[0][:0],
            one.mean[:0],
            ALIGNED=self._aligned,
            PART=PART,
            BLOCK=BLOCK,
            COLUMNS=COLUMNS,
            enable_fp_fusion=False,
        )

    def _find(self, gradients: list[Tensor]) -> None:
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self._addresses:
            rows = [_row(t, address) for t, address in zip(self._trained, addresses, strict=True)]
            self._table = _sent(torch.tensor(rows), self._device).to(self._device, non_blocking=True)
            self._addresses = addresses


def _row(trained: Trained, gradient: int) -> list[int]:
    tensors = trained.weight, trained.mean, trained.square
    weight, mean, square = (tensor.data_ptr() for tensor in tensors)
    return [weight, gradient, mean, square, trained.weight.numel(), trained.key, trained.first]


def _readable(gradient: Tensor) -> Tensor:
    """Contiguous, and where wide reads may begin."""
    gradient = gradient.contiguous()
    return gradient if gradient.data_ptr() % ALIGNMENT == 0 else gradient.clone()


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """In memory from which a GPU fetches without anybody waiting."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


# fmt: off
@triton.jit
def _kernel(
    table, parts, decays, numbers, counter, weight_like, gradient_like, mean_like,
    ALIGNED: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(parts + 2 * program).to(tl.int64)
    start = tl.load(parts + 2 * program + 1).to(tl.int64) * PART
    table += row * COLUMNS
    weight = tl.load(table).to(weight_like.dtype)
    gradient = tl.load(table + 1).to(gradient_like.dtype)
    mean = tl.load(table + 2).to(mean_like.dtype)
    square = tl.load(table + 3).to(mean_like.dtype)
    if ALIGNED:
        weight, gradient = tl.multiple_of(weight, 16), tl.multiple_of(gradient, 16)
        mean, square = tl.multiple_of(mean, 16), tl.multiple_of(square, 16)
    count = tl.load(table + 4)
    key = tl.load(table + 5)
    draw = tl.load(table + 6) // 2 + start // 2
    rate, new_in_mean, new_in_square = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    corrected_rate, correction, eps = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    lost = rate * tl.load(decays + row)
    noise_of = tl.load(counter)
    # fmt: off
    for block in range(0, tl.minimum(PART, count - start), BLOCK):
        place = start + block + tl.arange(0, BLOCK)
        draws = draw + block // 2 + tl.arange(0, BLOCK // 2)
        if start + block + BLOCK <= count:
            _update(weight, gradient, mean, square, place, None, key, draws, noise_of,
                    lost, new_in_mean, new_in_square, corrected_rate, correction, eps)
        else:
            _update(weight, gradient, mean, square, place, place < count, key, draws, noise_of,
                    lost, new_in_mean, new_in_square, corrected_rate, correction, eps)


@triton.jit
def _update(
    weight, gradient, mean, square, place, mask, key, draws, counter,
    lost, new_in_mean, new_in_square, corrected_rate, correction, eps,
):
    # fmt: on
    """One step of the elements at these places."""
    old = tl.load(weight + place, mask=mask).to(tl.float32)
    g = tl.load(gradient + place, mask=mask).to(tl.float32)
    m = tl.load(mean + place, mask=mask).to(tl.float32)
    s = tl.load(square + place, mask=mask).to(tl.float32)
    m = m + (g - m) * new_in_mean
    s = s + (g * g - s) * new_in_square
    old = old - old * lost
    new = old - tl.div_rn(m * corrected_rate, tl.sqrt_rn(s) * correction + eps)
    for_weight, for_mean, for_square, _ = words(key, draws, counter)
    tl.store(weight + place, _as_kept(new, for_weight, weight), mask=mask)
    tl.store(mean + place, _as_kept(m, for_mean, mean), mask=mask)
    tl.store(square + place, _as_kept(s, for_square, square), mask=mask)


@triton.jit
def _as_kept(x, word, pointer):
    """float32 as it is, or rounded to bfloat16 with the halves of these words."""
    if pointer.dtype.element_ty == tl.bfloat16:
        x = round_stochastically(x, halves(word))
    return x
