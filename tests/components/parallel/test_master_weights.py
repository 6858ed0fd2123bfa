"""Master weights in one dtype, layers computing in another, and gradients summed in a third."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.optim.adamw import AdamW
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import get_or_create_gradient
from support import pipelines
from support.checkpoints import SingleRankMesh
from support.processes import run_ranks
from support.weights import Weights

MIXED = DtypePolicy(compute="bfloat16")


def network(seed: int = 0) -> nn.Sequential:
    """Return two matrices and a norm, in float32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.LayerNorm(32, bias=False), nn.SiLU(), nn.Linear(32, 8, bias=False)
    )


def inputs(count: int) -> list[Tensor]:
    """Microbatches in bfloat16."""
    return [torch.randn(5, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(count)]


def test_each_layer_computes_in_its_dtype() -> None:
    """Hooks see bfloat16 weights and activations everywhere but in the layers excluded by a pattern."""
    module = network()
    store = ParameterStore.from_modules([module], DtypePolicy(compute="bfloat16", uncast=("1.weight",)))
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note(name: str) -> Any:
        return lambda layer, given: seen.update({name: (given[0].dtype, layer.weight.dtype)})

    for name in ("0", "3"):
        module.get_submodule(name).register_forward_pre_hook(note(name))
    module[3](module[2](module[0](inputs(1)[0])))
    assert seen == dict.fromkeys(("0", "3"), (torch.bfloat16, torch.bfloat16))
    assert module[1].weight.dtype == torch.float32 and store.masters.keys() == {"0.weight", "3.weight"}
    assert {master.dtype for master in store.masters.values()} == {torch.float32}


def test_gradients_of_microbatches_are_summed_in_float32() -> None:
    """The sum adds the microbatches' bfloat16 gradients in float32: equal to the bit, and far from a bfloat16 sum."""
    module, batches = network(), inputs(50)
    store = ParameterStore.from_modules([module], MIXED)
    parts = [torch.autograd.grad(module(x).square().sum(), [*module.parameters()]) for x in batches]
    for x in batches:
        module(x).square().sum().backward()
    store.after_backward()
    for index, (name, master) in enumerate(store.masters.items()):
        assert master.grad is not None and master.grad.dtype == torch.float32
        exact = torch.stack([part[index] for part in parts]).double().sum(0)
        torch.testing.assert_close(master.grad.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
        narrow = parts[0][index].bfloat16()
        for part in parts[1:]:
            narrow = narrow + part[index].bfloat16()
        assert (narrow.double() - exact).norm() > 100 * (master.grad.double() - exact).norm(), name
    assert all(parameter.grad is None for parameter in module.parameters())


def test_handed_over_gradients_add_up_and_are_not_copied() -> None:
    """A master takes the memory of the copy's gradient; a second sum is added to the first."""
    module = network()
    store = ParameterStore.from_modules([module], MIXED)
    module(inputs(1)[0]).sum().backward()
    where = {name: copy.grad.data_ptr() for name, copy in module.named_parameters() if copy.grad is not None}
    store.after_backward()
    assert {name: get_or_create_gradient(master).data_ptr() for name, master in store.masters.items()} == where
    once = {name: get_or_create_gradient(master).clone() for name, master in store.masters.items()}
    module(inputs(1)[0]).sum().backward()
    store.after_backward()
    for name, master in store.masters.items():
        torch.testing.assert_close(get_or_create_gradient(master), 2 * once[name], rtol=0, atol=0)


def test_weights_are_cast_in_place_and_follow_their_masters() -> None:
    """A copy keeps its address, has its master's numbers after a step, and is not written again until the next."""
    module = network()
    store = ParameterStore.from_modules([module], MIXED)
    where = [parameter.data_ptr() for parameter in module.parameters()]
    optimizer = torch.optim.AdamW([*store.masters.values()], lr=0.1, fused=True)
    for _ in range(3):
        store.before_passes()
        for x in inputs(4):
            module(x).sum().backward()
        versions = [parameter._version for parameter in module.parameters()]
        store.before_passes(only_if_changed=True)
        assert [parameter._version for parameter in module.parameters()] == versions, "cast without a change"
        store.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        store.before_passes(only_if_changed=True)
        for name, master in store.masters.items():
            assert torch.equal(module.get_parameter(name), master.bfloat16())
    assert [parameter.data_ptr() for parameter in module.parameters()] == where


def test_wide_gradients_reach_a_fused_optimizer() -> None:
    """bfloat16 parameters with float32 sums take AdamW's steps, step after step, and sum in float32 again."""
    module = network().bfloat16()
    ParameterStore.from_modules([module], DtypePolicy(parameter="bfloat16", gradient="float32"))
    weights = [*module.named_parameters()]
    optimizer = AdamW(parameters=Weights.from_parameters(dict(weights)), mesh=SingleRankMesh(), lr=0.1)
    optimizer.open()
    weight = weights[0][1]
    for index in (1, 2):
        before = weight.detach().clone()
        module(inputs(1)[0]).sum().backward()
        assert weight.grad is not None and weight.grad.dtype == torch.float32
        optimizer.run_phase(Step(index, 2))
        assert not torch.equal(weight, before)


def test_frozen_parameters_keep_the_copy_alone() -> None:
    """A frozen parameter has no master weights: only the layers' copy is kept."""
    module = network()
    module[0].weight.requires_grad_(False)
    store = ParameterStore.from_modules([module], MIXED)
    assert store.masters.keys() == {"1.weight", "3.weight"}
    assert module[0].weight.dtype == torch.bfloat16 and not module[0].weight.requires_grad


def test_tied_weights_stay_one() -> None:
    """A parameter of two modules has one master and one copy, whose gradient is the sum over both."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    store = ParameterStore.from_modules([first, second], MIXED)
    assert first.weight is second.weight and first.weight.dtype == torch.bfloat16
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    (first(x) + second(x)).sum().backward()
    store.after_backward()
    torch.testing.assert_close(get_or_create_gradient(store.masters["weight"]), torch.full((4, 4), 2.0))


def test_50_steps_stay_close_to_autocast() -> None:
    """Losses differ from torch.autocast's, with the same masters and data, by bfloat16 rounding at most."""
    ours, theirs = network(), network()
    store = ParameterStore.from_modules([ours], MIXED)
    optimizers = [
        torch.optim.AdamW([*store.masters.values()], lr=3e-3),
        torch.optim.AdamW(theirs.parameters(), lr=3e-3),
    ]
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    goal = data[:, :8].roll(1, 0).contiguous()
    losses: list[tuple[float, float]] = []
    for _ in range(50):
        store.before_passes()
        loss = F.mse_loss(ours(data.bfloat16()).float(), goal)
        torch.autograd.backward(loss)
        store.after_backward()
        with torch.autocast("cpu", torch.bfloat16):
            reference = F.mse_loss(theirs(data).float(), goal)
        torch.autograd.backward(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.item(), reference.item()))
    assert losses[-1][0] < 0.8 * losses[0][0], "nothing was learned"
    assert all(abs(one - other) < 0.01 * other for one, other in losses)


def test_schedules_have_the_gradients_of_one_process() -> None:
    """In mixed precision, over two ranks with a shared tied weight, gradients are float32 sums in any order."""
    names = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zero_bubble_1p", "zero_bubble_v")
    cases: list[pipelines.Case] = [(name, 4, True, False, "plain") for name in names]
    [[expected]] = run_ranks(pipelines.steps, 1, cases[:1], {}, "cpu", pipelines.MIXED)
    ranks = run_ranks(pipelines.steps, 2, cases, {}, "cpu", pipelines.MIXED)
    for number, case in enumerate(cases):
        grads = {name: grad for rank in ranks for name, grad in rank[number]["grads"].items()}
        assert grads.keys() == expected["grads"].keys(), case
        for name, grad in grads.items():
            assert grad.dtype == torch.float32
            scale = float(expected["grads"][name].abs().max())
            torch.testing.assert_close(
                grad, expected["grads"][name], rtol=2e-5, atol=2e-5 * scale, msg=f"{case} {name}"
            )
