"""Preference losses against TRL's trainers, with the same base, adapter and pairs."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.pipeline import sum_losses_and_weights
from drawloom.graph.project import Recipe
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY
from support.runs import drawloom, series
from support.steps import train

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "docs/examples/preferences.jsonl"
JUDGED_ANSWERS = ROOT / "docs/examples/feedback.jsonl"
TARGETS = ["q_proj", "v_proj", "down_proj"]
PEFT = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}


@attrs.frozen
class Result:
    """Mean loss of all pairs, and gradients and values of the adapter parameters by our names."""

    loss: float
    gradients: dict[str, Tensor]
    adapter: dict[str, Tensor]


def export_base(folder: Path, **sizes: int) -> Path:
    """Export a tiny random model whose tokenizer has a chat template."""
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    values: dict[str, Any] = {"model": TINY | {"tie_word_embeddings": False, "initializer_range": 0.3} | sizes}
    values |= {"run": {"name": "base", "folder": str(folder / "base")}, "tokenizer": tokenizer}
    with Recipe.load("first_run").with_values(values).open(only="export") as objects:
        objects["export"].run_after_training(1)
    return folder / "base/export"


def run_our_step(
    folder: Path, path: Path, *loss: str, recipe: str = "dpo", data: Path = PAIRS
) -> tuple[Result, list[tuple[Tensor, Tensor]]]:
    """Run one step of a recipe with a random adapter; also return the ids and weights of the documents, in pairs."""
    values = (f"vars.base={path}", f'tokens.paths=["{data}"]', "tokens.validation_fraction=0.0", *loss)
    words = (*values, f"run.folder={folder / 'run'}", f"adapters.lora.targets={json.dumps(TARGETS)}")
    with Recipe.load(recipe, *words).open(["executor", "packing"]) as objects:
        named = dict(objects["stages"].named_parameters())
        generator = torch.Generator().manual_seed(1)
        for parameter in named.values():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        rows = objects["packing"]
        state = train(objects["executor"], [rows.batch("train", range(rows.count_rows("train")))])
        total, weight = sum_losses_and_weights(state)
        gradients = {name: tensor.grad / weight for name, tensor in named.items() if tensor.grad is not None}
        documents = objects["tokens"].documents("train")
        texts = [documents.read(number, 0, length) for number, length in enumerate(documents.lengths)]
        pairs = [(torch.tensor(text.ids.astype("int64")), torch.tensor(text.weights > 0)) for text in texts]
        values_by_name = {name: tensor.detach().clone() for name, tensor in named.items()}
        return Result(float(total / weight), gradients, values_by_name), pairs


Pairs = list[tuple[Tensor, Tensor]]


def compute_dpo_loss(trainer: Any, pairs: Pairs) -> Tensor:
    """Return `DPOTrainer`'s loss for one batch, chosen answers before rejected answers."""
    ordered = pairs[0::2] + pairs[1::2]

    def pad(column: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([document[column] for document in ordered], batch_first=True)

    lengths = torch.tensor([len(ids) for ids, _ in ordered])
    inputs = {"input_ids": pad(0), "completion_mask": pad(1).long()}
    inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]).long()
    loss: Tensor = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    return loss


def compute_pairwise_loss(trainer: Any, pairs: Pairs) -> Tensor:
    """Return the mean loss of `CPOTrainer` or `ORPOTrainer` over batches of one pair."""
    trainer.padding_value = 0  # behind the ids of the shorter answer
    losses = []
    for chosen, rejected in zip(pairs[0::2], pairs[1::2], strict=True):
        batch = {}
        for side, (ids, is_answer) in (("chosen", chosen), ("rejected", rejected)):
            batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = ids[None], torch.ones_like(ids)[None]
            batch[f"{side}_labels"] = ids.where(is_answer, -100)[None]
        losses.append(trainer.get_batch_loss_metrics(trainer.model, batch)[0])
    return torch.stack(losses).mean()


def compute_kto_loss(trainer: Any, pairs: Pairs) -> Tensor:
    """Return `KTOTrainer`'s loss for one batch of judged answers and their mismatched answers."""
    labels = [json.loads(line)["label"] for line in JUDGED_ANSWERS.read_text("utf-8").splitlines()]
    inputs: dict[str, Any] = {"label": torch.tensor(labels)}
    for prefix, documents in (("", pairs[0::2]), ("KL_", pairs[1::2])):
        lengths = torch.tensor([len(ids) for ids, _ in documents])
        ids, masks = (
            torch.nn.utils.rnn.pad_sequence([document[column] for document in documents], batch_first=True)
            for column in (0, 1)
        )
        attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        inputs |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": attention_mask}
        inputs[f"{prefix}completion_mask"] = masks.long()
    loss: Tensor = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    return loss


def run_trl_step(
    folder: Path, path: Path, names: tuple[str, str], options: dict[str, Any], adapter: dict[str, Tensor], pairs: Pairs
) -> Result:
    """Run a TRL trainer with PEFT's LoRA; `names` are its module and the prefix of its classes."""
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, kind = import_module(names[0]), names[1]
    trainer = getattr(module, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=getattr(module, f"{kind}Config")(
            str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, save_strategy="no", **options
        ),
        train_dataset=datasets.Dataset.from_list(ROWS["KTO" if kind == "KTO" else ""]),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    named = {_our_name(name): tensor for name, tensor in trainer.model.named_parameters() if tensor.requires_grad}
    assert named.keys() == adapter.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(adapter[name])
    compute = {"DPO": compute_dpo_loss, "KTO": compute_kto_loss}.get(kind, compute_pairwise_loss)
    loss = compute(trainer, pairs)
    loss.backward()  # type: ignore[no-untyped-call]
    return Result(float(loss), {name: tensor.grad for name, tensor in named.items()}, adapter)


def _our_name(name: str) -> str:
    for leaf, peft in PEFT.items():
        name = name.replace(peft, leaf)
    return name.removeprefix("base_model.model.")


JUDGED = {"prompt": "a", "completion": "b", "label": True}
ROWS = {"": [{"prompt": "a", "chosen": "b", "rejected": "c"}], "KTO": [JUDGED, JUDGED | {"label": False}]}
DPO, CPO, ORPO = ("trl", "DPO"), ("trl.experimental.cpo", "CPO"), ("trl.experimental.orpo", "ORPO")


@pytest.mark.soak  # importing TRL and its trainer takes 15 s
@pytest.mark.filterwarnings("ignore")  # warnings of TRL and its packages
@pytest.mark.parametrize(
    ("words", "names", "options"),
    [
        (("loss.use=loss.dpo", "loss.beta=0.5"), DPO, {"beta": 0.5}),
        (("loss.use=loss.ipo", "loss.beta=0.5"), DPO, {"beta": 0.5, "loss_type": "ipo"}),
        (("loss.use=loss.cpo", "loss.beta=0.5", "loss.alpha=0.7"), CPO, {"beta": 0.5, "cpo_alpha": 0.7}),
        (
            ("loss.use=loss.simpo", "loss.gamma=0.3"),
            CPO,
            {"beta": 2.0, "simpo_gamma": 0.3, "cpo_alpha": 0.0, "loss_type": "simpo"},
        ),
        (("loss.use=loss.orpo", "loss.beta=0.5"), ORPO, {"beta": 0.5}),
    ],
    ids=["dpo", "ipo", "cpo", "simpo", "orpo"],
)
def test_loss_and_gradients_equal_trl(
    tmp_path: Path, words: tuple[str, ...], names: tuple[str, str], options: dict[str, Any]
) -> None:
    """The shipped pairs, packed here and padded in TRL, have equal losses and gradients."""
    path = export_base(tmp_path)
    actual, pairs = run_our_step(tmp_path, path, *words)
    expected = run_trl_step(tmp_path, path, names, options, actual.adapter, pairs)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5) and abs(actual.loss - 0.6931) > 0.05
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_kto_and_its_gradients_equal_trl(tmp_path: Path) -> None:
    """A step of judged answers has the loss and gradients of one batch in TRL, with a divergence above 0."""
    path = export_base(tmp_path)
    words = ("loss.beta=0.5", "loss.good_weight=1.5", "loss.bad_weight=0.8")
    actual, pairs = run_our_step(tmp_path, path, *words, recipe="kto", data=JUDGED_ANSWERS)
    options = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.8, "per_device_train_batch_size": 2}
    expected = run_trl_step(tmp_path, path, ("trl", "KTO"), options, actual.adapter, pairs)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient, rtol=1e-4, atol=3e-5 * float(gradient.abs().max()))


SHARED = ("packing.share_prompts=true", "kernels.attention=tree")
PAIRWISE = ("dpo", "ipo", "cpo", "simpo", "orpo")
LOSSES: dict[str, tuple[Any, ...]] = {name: ("dpo", PAIRS, f"loss.use=loss.{name}") for name in PAIRWISE}
LOSSES |= {"kto": ("kto", JUDGED_ANSWERS), "reward": ("reward", PAIRS)}


def test_a_prompt_computed_once_changes_no_loss_and_no_gradient(tmp_path: Path) -> None:
    """In float64, every loss for pairs has the same value and gradients in rows with a pair's beginning once."""
    path = export_base(tmp_path)
    for name, (recipe, data, *words) in LOSSES.items():
        words += ["precision.parameter=float64", "vars.length=256"]
        (separate, _), (shared, _) = (
            run_our_step(tmp_path, path, *words, *more, recipe=recipe, data=data) for more in ((), SHARED)
        )
        assert shared.loss == pytest.approx(separate.loss, rel=1e-12), name
        for parameter, gradient in separate.gradients.items():
            torch.testing.assert_close(shared.gradients[parameter], gradient, rtol=1e-9, atol=1e-13)
        assert separate.gradients and any(gradient.any() for gradient in separate.gradients.values()), name


@pytest.mark.soak  # five runs, four of them with two processes
def test_shared_prompts_train_the_same_on_any_mesh(tmp_path: Path) -> None:
    """
    Steps with shared prompts have the same losses, margins, norms and token counts as separate documents on every mesh.

    An update of SGD is the gradient, so that the last step's values depend on all gradients before.
    """
    base = [f"vars.base={export_base(tmp_path, num_key_value_heads=2)}", f'tokens.paths=["{PAIRS}"]', "vars.length=256"]
    base += ["precision.parameter=float64", "optimizer.use=optim.sgd", "optimizer.lr=1e-1", "evaluate.every=1"]
    base += ["trainer.steps=3", "trainer.on_finish=[]", "batch.global_size=4", "batch.micro_size=2"]
    base += ["device.share=true"]
    names = ("loss", "grad_norm", "reward_margin", "tokens", "validation_loss")
    layouts = ["mesh.pipeline=2", "mesh.data_shard=2", "mesh.tensor=2", "mesh.data_replicate=2"]
    runs = []
    for number, layout in enumerate(["", "", *layouts]):
        words = [*base, *([layout] if layout else []), *(SHARED if number else ())]
        ranks = 2 if layout else 1
        outcomes = drawloom(tmp_path, "run", "dpo", f"run.name=run_{number}", *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        runs.append(series(tmp_path / f"runs/run_{number}", *names))
    for run in runs[1:]:
        for ours, theirs in zip(run, runs[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("recipe", "overlay", "data"),
    [
        ("chat", "with_all_weights", ROOT / "docs/examples/conversations.jsonl"),
        ("dpo", "with_all_weights_and_reference", PAIRS),
        ("kto", "with_all_weights_and_reference", JUDGED_ANSWERS),
    ],
)
def test_one_overlay_trains_all_weights(tmp_path: Path, recipe: str, overlay: str, data: Path) -> None:
    """Every weight of the base changes, and a preference loss begins at a reference equal to the model."""
    words = [f"vars.base={export_base(tmp_path)}", f'tokens.paths=["{data}"]', f"run.folder={tmp_path / 'run'}"]
    words += ["trainer.steps=2", 'trainer.on_finish=["@adapter"]', "optimizer.lr=1e-2"]
    with Recipe.load(recipe, *words, overlays=[overlay]).open() as run:
        before = {name: tensor.detach().clone() for name, tensor in run["stages"].named_parameters()}
        losses = [step.state.number("loss") for step in run.steps()]
        after = dict(run["stages"].named_parameters())
        assert before.keys() == after.keys() and "model.embed_tokens.weight" in before
        assert not any(torch.equal(before[name], tensor) for name, tensor in after.items())
    start = {"dpo": math.log(2), "kto": 0.5}.get(recipe)
    assert start is None or losses[0] == pytest.approx(start, abs=1e-6)
    assert losses[1] < losses[0] and not (tmp_path / "run/adapter").exists()
