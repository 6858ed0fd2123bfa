"""A blueprint made real."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.ports.features import StageFeature
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.program import Program
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.components.weights.mapper import rename
from drawloom.graph import UserError
from support.doubles import Machine
from support.families import small


@attrs.define
class Blueprint:
    """A model of linear layers, named by their numbers; a parameter is filled with the length of its name."""

    num_hidden_layers: int = 4
    vocab_size: int = 3
    max_sequence_length: int | None = None
    built_on: list[str] = attrs.field(factory=list)

    def build(self, span: LayerRange) -> nn.Module:
        module = nn.ModuleDict({str(layer): nn.Linear(2, 2, bias=False) for layer in range(span.first, span.last)})
        self.built_on += [parameter.device.type for parameter in module.parameters()]
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return [part for part in module.modules() if isinstance(part, nn.Linear)]

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        parameter.fill_(len(name) + seed)

    def hugging_face_config(self) -> dict[str, Any]:
        return {}

    def hugging_face_mapper(self) -> Mapper:
        return rename({f"{layer}.weight": f"theirs.{layer}" for layer in range(self.num_hidden_layers)})


class Scaled(nn.Module):
    """A linear layer with a table outside the state, and a count in it."""

    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.register_buffer("table", torch.empty(2), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(2.0))
        self.count.fill_(7)


class WithBuffers(Blueprint):
    """A blueprint whose layers have buffers; its folder holds their counts."""

    def build(self, span: LayerRange) -> nn.Module:
        return nn.ModuleDict({str(layer): Scaled() for layer in range(span.first, span.last)})

    def hugging_face_mapper(self) -> Mapper:
        names = [f"{layer}.{name}" for layer in range(self.num_hidden_layers) for name in ("weight", "count")]
        return rename({name: f"theirs.{name}" for name in names})


@attrs.frozen
class Loops:
    """So many stages on each rank."""

    stages_per_rank: int = 1

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks)) * self.stages_per_rank

    def program(self, ranks: int, microbatches: int) -> Program:
        return Program.from_rank_programs([], self.stage_to_rank(ranks))


@attrs.frozen
class Half:
    """Parameters in bfloat16."""

    parameter: torch.dtype = torch.bfloat16
    compute: torch.dtype = torch.bfloat16
    gradient: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    uncast: tuple[str, ...] = ()


class Freeze(StageFeature):
    """A feature: nothing is trained but layer 0."""

    def transform(self, module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("0."))
        return module


def open_stages(mesh: Any, job: Any, model: Blueprint, **changes: Any) -> MaterializedStages:
    """Open stages."""
    parts: dict[str, Any] = {
        "schedule": Loops(),
        "loss": NextToken(),
        "precision": Half(),
        "device": Machine(),
        **changes,
    }
    stages = MaterializedStages(model=model, mesh=mesh, job=job, **parts)
    stages.open()
    return stages


def test_modules_are_built_on_meta_and_filled_by_name(one_rank: Any, job: Any) -> None:
    """The blueprint builds on the meta device; real parameters have the precision's dtype and their initial values."""
    model = Blueprint()
    stages = open_stages(one_rank, job, model)
    assert set(model.built_on) == {"meta"}
    assert [name for name, _ in stages.named_parameters()] == [f"{layer}.weight" for layer in range(4)]
    assert all(
        p.dtype == torch.bfloat16 and bool((p == len(name) + job.seed).all()) for name, p in stages.named_parameters()
    )


@pytest.mark.parametrize(("rank", "per_rank", "names"), [(0, 1, "01"), (1, 1, "23"), (0, 2, "02"), (1, 2, "13")])
def test_each_rank_owns_its_part(rank: int, per_rank: int, names: str, mesh_of: Any, job: Any) -> None:
    """Stages are dealt out over ranks, and layers keep their numbers."""
    mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": rank})
    stages = open_stages(mesh, job, Blueprint(), schedule=Loops(per_rank))
    assert "".join(name[0] for name, _ in stages.named_parameters()) == names
    assert [stage.count for stage in stages.local] == [2 * per_rank] * per_rank


class Shares(StageFeature):
    """A feature: two layers have one parameter, or one module."""

    def __init__(self, module: bool) -> None:
        self.module = module

    def transform(self, module: Any) -> nn.Module:
        if self.module:
            module["3"] = module["1"]
        else:
            module["3"].weight = module["1"].weight
        return module  # type: ignore[no-any-return]


def test_weight_decay_and_muon_follow_the_roles_that_layers_declare(one_rank: Any, job: Any) -> None:
    """Convolutions and decays in gated delta nets, and biases in stacked experts, are no matrices, whatever shape."""
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "layer_types": ["linear_attention"] * 4}
    hybrid: Any = small(Qwen35, num_hidden_layers=4, linear_key_head_dim=4, linear_value_head_dim=4, **delta)
    experts: Any = small(GptOss, num_hidden_layers=4, num_experts=3, num_experts_per_tok=2)
    vectors = ("norm", "conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "sinks", "bias")
    for model in (hybrid, experts):
        stages = open_stages(one_rank, job, model)
        muon, adamw = Muon(parameters=stages, mesh=one_rank, lr=0.1), AdamW(parameters=stages, mesh=one_rank, lr=0.1)
        for optimizer in (muon, adamw):
            optimizer.open()
        decayed = {
            part for group in adamw._optimizers[0].param_groups if group["weight_decay"] for part in group["params"]
        }
        moments = muon.moment_names_by_parameter()
        for name, part in stages.named_parameters():
            is_matrix = not name.removesuffix(".weight").endswith(vectors)
            assert (part in decayed) == is_matrix, name
            assert (moments[name] == ("momentum_buffer",)) == (is_matrix and ".layers." in name), name


def test_a_parameter_of_two_modules_is_refused(one_rank: Any, job: Any) -> None:
    """Two copies in memory would have one entry in a checkpoint; a module shared by two layers stays one."""
    with pytest.raises(UserError, match=r"^1\.weight and 3\.weight are one parameter of two modules"):
        open_stages(one_rank, job, Blueprint(), features=[Shares(module=False)])
    stages = open_stages(one_rank, job, Blueprint(), features=[Shares(module=True)])
    assert [name for name, _ in stages.named_parameters()] == ["0.weight", "1.weight", "2.weight"]
    layers: Any = stages.local[0].module
    assert layers["3"].weight is layers["1"].weight is stages.named_parameters()[1][1]


def test_features_transform_before_the_parameters_are_real(one_rank: Any, job: Any) -> None:
    """Frozen parameters are neither trained nor saved: the state has their origin."""
    stages = open_stages(one_rank, job, Blueprint(), features=[Freeze()])
    assert [name for name, _ in stages.named_parameters()] == ["0.weight"]
    assert stages.state_dict().keys() == {"0.weight", "frozen"}
    assert stages.state_dict()["frozen"] == f"seed {job.seed}"
    assert stages.device_bytes()["gradients"] == 4 * torch.float32.itemsize


def test_state_moves_between_stages(one_rank: Any, job: Any) -> None:
    """Loaded parameters equal the saved ones; mismatched parameters are named."""
    stages, other = open_stages(one_rank, job, Blueprint()), open_stages(one_rank, job, Blueprint())
    with torch.no_grad():
        stages.named_parameters()[0][1].fill_(5)
    other.load_state_dict(stages.state_dict())
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(stages.named_parameters(), other.named_parameters(), strict=True)
    )
    with pytest.raises(KeyError, match=r"3\.weight"):
        other.load_state_dict({name: value for name, value in stages.state_dict().items() if name != "3.weight"})


class Bias(nn.Module):
    """A trained bias by word, and a fixed number."""

    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))
        self.register_buffer("fixed", torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias)
        self.fixed.fill_(2)


class Biased(NextToken):
    """A loss with a module of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_parameters_of_a_loss_belong_to_the_last_stage(mesh_of: Any, job: Any) -> None:
    """They are trained and saved under `loss` by the rank with the head, from values determined by the seed."""
    contents: list[dict[str, Any]] = []
    for rank, module in ((0, Bias()), (1, Bias()), (1, nn.ModuleDict({"inner": Bias()}))):
        mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": rank})
        stages = open_stages(mesh, job, Blueprint(), loss=Biased(module))
        contents.append({"trained": dict(stages.named_parameters()), "saved": stages.state_dict(), "stages": stages})
    assert contents[0]["trained"].keys() == {"0.weight", "1.weight"}
    assert contents[1]["trained"].keys() == {"2.weight", "3.weight", "loss.bias"}
    assert contents[1]["saved"].keys() == {"2.weight", "3.weight", "loss.bias", "loss.fixed"}
    assert contents[2]["trained"].keys() == {"2.weight", "3.weight", "loss.inner.bias"}
    bias = contents[1]["trained"]["loss.bias"]
    assert bias.dtype == torch.bfloat16 and bias.abs().min() > 0 and contents[1]["saved"]["loss.fixed"] == 2
    (again,) = open_stages(mesh, job, Blueprint(), loss=Biased(Bias())).local
    assert torch.equal(again.module.get_parameter("loss.bias"), bias)
    assert not torch.equal(contents[2]["trained"]["loss.inner.bias"], bias)
    assert again.gatherable_parameters().keys() == {"2.weight", "3.weight", "loss.bias"}


def test_parameters_of_a_loss_are_in_no_folder_of_weights(one_rank: Any, job: Any, tmp_path: Path) -> None:
    """If the model starts from a folder, the loss starts from its module's values."""
    save_file({f"theirs.{layer}": torch.randn(2, 2) for layer in range(4)}, tmp_path / "model.safetensors")
    stages = open_stages(one_rank, job, Blueprint(), loss=Biased(Bias()), weights=tmp_path)
    fresh = open_stages(one_rank, job, Blueprint(), loss=Biased(Bias()))
    assert torch.equal(stages.state_dict()["loss.bias"], fresh.state_dict()["loss.bias"])


def test_a_loss_that_leaves_a_parameter_unfilled_is_refused(one_rank: Any, job: Any) -> None:
    """A module without reset_parameters(), or whose reset_parameters() misses a parameter, is named with it."""
    with pytest.raises(UserError, match=r"loss\.0 \(Scale\) registers the tensors weight, but has no reset_parameters"):
        open_stages(one_rank, job, Blueprint(), loss=Biased(nn.Sequential(Scale())))
    missed = nn.Linear(2, 2)
    missed.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(UserError, match=r"loss \(Linear\) registers the tensors extra, but has a reset_parameters"):
        open_stages(one_rank, job, Blueprint(), loss=Biased(missed))


class Scale(nn.Module):
    """A parameter that only the constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_buffers_have_the_values_of_their_modules(one_rank: Any, job: Any) -> None:
    """A buffer keeps its own dtype, whatever the parameters' dtype; a persistent buffer is saved and loaded."""
    stages, other = open_stages(one_rank, job, WithBuffers()), open_stages(one_rank, job, WithBuffers())
    buffers = dict(stages.local[0].module.named_buffers())
    assert len(buffers) == 8
    for name, buffer in buffers.items():
        assert buffer.tolist() == (7 if name.endswith("count") else [0.0, 1.0])
        assert buffer.dtype == (torch.int64 if name.endswith("count") else torch.float32)
    buffers["2.count"].fill_(9)
    names = list(stages.state_slices())
    assert names == list(stages.state_dict()) and "2.count" in names
    assert not any(name.endswith("table") for name in names)
    other.load_state_dict(stages.state_dict())
    assert other.state_dict()["2.count"] == 9


def test_buffers_of_one_name_on_one_rank_are_all_loaded(mesh_of: Any, job: Any) -> None:
    """Two stages on a rank with a buffer under the same name both load the saved value."""

    class Common(WithBuffers):
        def build(self, span: LayerRange) -> nn.Module:
            return nn.ModuleDict({**super().build(span), "common": Scaled()})  # type: ignore[dict-item]

    mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": 0})
    stages = open_stages(mesh, job, Common(), schedule=Loops(2))
    stages.load_state_dict({**stages.state_dict(), "common.count": torch.tensor(5)})
    assert [int(stage.module.get_buffer("common.count")) for stage in stages.local] == [5, 5]


def test_weights_of_a_folder_leave_no_buffer_unfilled(one_rank: Any, job: Any, tmp_path: Path) -> None:
    """Counts come from the folder; tables, absent from it, come from their modules."""
    theirs = {f"theirs.{layer}.weight": torch.randn(2, 2) for layer in range(4)}
    save_file(
        theirs | {f"theirs.{layer}.count": torch.tensor(layer) for layer in range(4)}, tmp_path / "model.safetensors"
    )
    stages = open_stages(one_rank, job, WithBuffers(), weights=tmp_path)
    state = stages.state_dict()
    assert all(torch.equal(state[f"{n}.weight"], theirs[f"theirs.{n}.weight"].bfloat16()) for n in range(4))
    assert [int(state[f"{n}.count"]) for n in range(4)] == [0, 1, 2, 3]
    assert all(stages.local[0].module.get_buffer(f"{n}.table").tolist() == [0.0, 1.0] for n in range(4))


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_equal_those_of_the_folder(rank: int, mesh_of: Any, job: Any, tmp_path: Path) -> None:
    """Ranks read their layers under the folder's names, in their own precision; frozen weights stay frozen."""
    theirs = {f"theirs.{layer}": torch.randn(2, 2) for layer in range(4)}
    save_file(theirs, tmp_path / "model.safetensors")
    mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": rank})
    stages = open_stages(mesh, job, Blueprint(), features=[Freeze()], weights=tmp_path)
    parameters = dict(stages.local[0].named_masters_or_parameters())
    assert list(parameters) == [f"{layer}.weight" for layer in ((0, 1), (2, 3))[rank]]
    assert all(torch.equal(tensor, theirs[f"theirs.{name[0]}"].bfloat16()) for name, tensor in parameters.items())
    assert [name for name, _ in stages.named_parameters()] == ["0.weight"][rank:]


def test_a_folder_without_weights_is_refused(one_rank: Any, job: Any, tmp_path: Path) -> None:
    """The error is one sentence for the user."""
    with pytest.raises(UserError, match="nowhere"):
        open_stages(one_rank, job, Blueprint(), weights=tmp_path / "nowhere")


def test_embedding_and_head_may_count_as_layers(mesh_of: Any, job: Any) -> None:
    """A first stage whose embedding weighs a layer has one layer less; a stage without layers is refused."""
    mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": 0})
    assert len(open_stages(mesh, job, Blueprint(num_hidden_layers=5), embedding_layer_cost=1).named_parameters()) == 2
    assert len(open_stages(mesh, job, Blueprint(num_hidden_layers=5), head_layer_cost=1).named_parameters()) == 3
    with pytest.raises(UserError, match="without a layer"):
        open_stages(mesh, job, Blueprint(num_hidden_layers=1))


@attrs.frozen
class Cuts(Loops):
    """A schedule with layer counts for its stages."""

    sizes: tuple[int, ...] = (3, 1)

    def layers_by_stage(self, ranks: int, layers: int) -> tuple[int, ...]:
        return self.sizes


@pytest.mark.parametrize("rank", [0, 1])
def test_stages_have_the_layers_that_a_schedule_gives_them(rank: int, mesh_of: Any, job: Any) -> None:
    """Ranks build their stages' layers; sizes that contradict the model are refused."""
    mesh = mesh_of(sizes={"pipeline": 2}, indices={"pipeline": rank})
    stages = open_stages(mesh, job, Blueprint(), schedule=Cuts())
    assert [name for name, _ in stages.named_parameters()] == [["0.weight", "1.weight", "2.weight"], ["3.weight"]][rank]
    assert [(stage.span.embedding, stage.span.head) for stage in stages.local] == [[(True, False)], [(False, True)]][
        rank
    ]
    for sizes in ((3, 2), (4, 0), (2, 1, 1)):
        with pytest.raises(
            UserError, match=r"Cuts.layers_by_stage returns .* for 4 layers in 2 stages; return at least"
        ):
            open_stages(mesh, job, Blueprint(), schedule=Cuts(sizes=sizes))


def test_memory_counts_every_tensor_of_a_step_once(one_rank: Any, job: Any) -> None:
    """Casts are masters and copies, all else parameters; gradients are counted in their own dtype before they exist."""
    model = Blueprint()
    whole = open_stages(one_rank, job, model)
    assert whole.device_bytes() == {"masters": 0, "compute_copies": 0, "parameters": 4 * 4 * 2, "gradients": 4 * 4 * 4}
    cast = open_stages(one_rank, job, model, precision=Half(parameter=torch.float32))
    assert cast.device_bytes() == {
        "masters": 4 * 4 * 4,
        "compute_copies": 4 * 4 * 2,
        "parameters": 0,
        "gradients": 4 * 4 * 4,
    }
