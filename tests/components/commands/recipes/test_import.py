"""Recipes for configurations of other frameworks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from drawloom.components.commands.recipes._foreign_config import read_config
from drawloom.graph.cli.main import main
from drawloom.graph.project import Recipe
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY

EXAMPLES = Path(__file__).parents[4] / "docs/examples"
AXOLOTL = """
base_model: {base}
datasets:
  - path: {data}
    type: chat_template
val_set_size: 0.2
adapter: {adapter}
sequence_len: 512
sample_packing: {packing}
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 2
optimizer: adamw_torch
model_type: LlamaForCausalLM
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
lora_r: 4
lora_target_modules: [q_proj, v_proj]
flash_attention: true
unheard_of: {{ a: 1 }}
"""
TRL = """
# a comment
accelerate launch trl/scripts/dpo.py --model_name_or_path {base} --beta 0.2 --learning_rate=1e-6 --max_steps 7 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --eval_strategy epoch --bf16 --adam_beta2 0.98 \\
    --report_to tensorboard --optim adamw_8bit
"""
GRPO = """
model_name_or_path: base
max_prompt_length: 512
num_generations: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 6
report_to: [wandb, comet_ml]
optim: lion_8bit
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.3
[training]
local_batch_size = 2
seq_len = 8192
steps = 100
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[checkpoint]
enable = false
interval = 500
[validation]
enable = false
freq = 10
[metrics]
enable_tensorboard = true
"""

Import = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    values = {"model": TINY | sizes, "run": {"name": "base", "folder": str(folder / "run")}, "tokenizer": tokenizer}
    with Recipe.load("first_run").with_values(values).open(only="export") as objects:
        objects["export"].run_after_training(1)
    return folder / "run/export"


@pytest.fixture
def run_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Import:
    """Return a function that writes a configuration, imports it, and returns the recipe and the unmapped keys."""

    def run(name: str, text: str, *words: str) -> dict[str, object]:
        (tmp_path / name).write_text(text, "utf-8")
        code = main(["import", str(tmp_path / name), *words, "--format", "json"])
        result: dict[str, object] = json.loads(capsys.readouterr().out)
        assert code == bool(result["unmapped"])
        return result | {"values": tomli.loads(str(result["recipe"]))}

    return run


@pytest.mark.parametrize(
    ("adapter", "packing", "bases"),
    [("lora", "true", "chat"), ("qlora", "false", ["chat", "with_nf4"]), ("", "true", ["chat", "with_all_weights"])],
)
def test_axolotl_configuration_becomes_a_valid_recipe(
    run_import: Import, base: Path, tmp_path: Path, adapter: str, packing: str, bases: object
) -> None:
    """The recipe has no problem, its values are the configuration's, and the unknown key is reported."""
    text = AXOLOTL.format(base=base, data=EXAMPLES / "conversations.jsonl", adapter=adapter, packing=packing)
    result = run_import("mine.yml", text)
    values = result["values"]
    assert result["unmapped"] == ["unheard_of = {'a': 1}"]
    assert isinstance(values, dict) and values["extends"] == bases
    assert values["batch"] == {"micro_size": 2, "global_size": 6}
    assert values["trainer"] == {"epochs": 2} and values["evaluate"] == {"every": {"epochs": 0.25}}
    assert values["lr"] == {"use": "learning_rate.cosine", "warmup_percent": 10.0}
    assert values["optimizer"] == {"use": "optim.adamw", "lr": 2e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    (tmp_path / "mine.toml").write_text(str(result["recipe"]), "utf-8")
    Recipe.load(str(tmp_path / "mine.toml")).check()


def test_arguments_of_trl_become_a_valid_recipe(run_import: Import, base: Path, tmp_path: Path) -> None:
    """Given steps replace the default epochs, sizes are multiplied by the ranks, and all weights are trained."""
    result = run_import("dpo.sh", TRL.format(base=base), "--ranks", "2")
    values = result["values"]
    assert isinstance(values, dict) and result["unmapped"] == []
    assert values["extends"] == ["dpo", "with_mixed_precision", "with_all_weights_and_reference"]
    assert values["trainer"] == {"steps": 7} and values["loss"] == {"beta": 0.2}
    assert values["batch"] == {"micro_size": 2, "global_size": 16} and values["evaluate"] == {"every": "epoch"}
    assert values["optimizer"]["betas"] == [0.9, 0.98] and values["optimizer"]["lr"] == 1e-6
    assert values["optimizer"]["state_dtype"] == "uint8"
    assert values["trackers"] == {"tensorboard": {"use": "trackers.tensorboard"}}
    (tmp_path / "dpo.toml").write_text(str(result["recipe"]), "utf-8")
    data = EXAMPLES / "preferences.jsonl"
    Recipe.load(str(tmp_path / "dpo.toml"), f'tokens.paths=["{data}"]').check()


def test_torchtitan_configuration_becomes_a_valid_recipe(run_import: Import, tmp_path: Path) -> None:
    """A known flavor is a shipped recipe, -1 is auto, and a size of 1 is left out."""
    result = run_import("titan.toml", TORCHTITAN, "--ranks", "4")
    values = result["values"]
    assert isinstance(values, dict) and result["unmapped"] == [] and values["evaluate"] == {"every": "never"}
    assert values["extends"] == ["llama3_8b", "with_tensorboard"]
    assert values["mesh"] == {"data_shard": "auto", "tensor": 2} and values["checkpoint"] == {"every": "never"}
    assert values["batch"] == {"micro_size": 2, "global_size": 8} and values["trainer"] == {"steps": 100}
    assert values["lr"] == {"use": "learning_rate.wsd", "warmup_steps": 20, "decay_percent": 30.0}
    (tmp_path / "titan.imported.toml").write_text(str(result["recipe"]), "utf-8")
    words = ("vars.data=store", f"vars.tokenizer={tokenizer_folder(tmp_path / 'tokenizer')}")
    Recipe.load(str(tmp_path / "titan.imported.toml"), *words).check(skip_machine_checks=True)


def test_rows_of_grpo_are_prompts(run_import: Import) -> None:
    """
    TRL's batch sizes count completions, and drawloom's prompts. A tracker and an optimizer without a component are
    reported, and the base's optimizer gets no setting that it lacks.
    """
    result = run_import("grpo.yaml", GRPO, "--ranks", "2")
    values = result["values"]
    assert isinstance(values, dict) and "state_dtype" not in values["optimizer"]
    assert result["unmapped"] == ["optim = 'lion_8bit'", "report_to = 'comet_ml'"]
    assert values["extends"] == "grpo" and values["vars"] == {"base": "base", "length": 512}
    assert values["batch"] == {"micro_size": 1, "global_size": 6} and values["rollout"] == {"group_size": 8}
    assert values["rollouts"] == {"max_tokens": 512} and values["optimizer"]["lr"] == 1e-6  # TRL's defaults


@pytest.mark.parametrize(
    ("config", "loss", "advantages", "unmapped"),
    [
        ("reward_funcs: null", {"variant": "dapo", "clip_low": 0.2, "clip_high": 0.2}, {"scale": "std"}, []),
        (
            "num_generations: 4\nloss_type: bnpo\nepsilon: 0.1\nepsilon_high: 0.3\nscale_rewards: false\n"
            "mask_truncated_completions: true",
            {"variant": "dapo", "clip_low": 0.1, "clip_high": 0.3},
            {"scale": "none", "truncated": "drop"},
            [],
        ),
        (
            "num_generations: 4\nloss_type: sapo\nscale_rewards: batch",
            {"clip_low": 0.2, "clip_high": 0.2},
            {},
            ["loss_type = 'sapo'", "scale_rewards = 'batch'"],
        ),
    ],
)
def test_the_loss_of_grpo_is_the_configurations(
    run_import: Import, base: Path, tmp_path: Path, config: str, loss: object, advantages: object, unmapped: object
) -> None:
    """The recipe has TRL's variant, clip and scale, or names the missing one, and it has no problem."""
    result = run_import("mine.yaml", f"model_name_or_path: {base}\nper_device_train_batch_size: 8\n{config}")
    values = result["values"]
    assert isinstance(values, dict) and result["unmapped"] == unmapped
    assert values["loss"] == loss and values.get("advantages", {}) == advantages
    (tmp_path / "mine.toml").write_text(str(result["recipe"]), "utf-8")
    Recipe.load(str(tmp_path / "mine.toml"), "examples.use=data.sums").check()
    nested = "\n".join(f"  {line}" for line in config.splitlines())
    other = run_import("mine.yml", f"base_model: {base}\nrl: grpo\nmicro_batch_size: 8\ntrl:\n{nested}")
    assert other["unmapped"] == unmapped and isinstance(other["values"], dict)
    assert other["values"]["loss"]["clip_high"] == values["loss"]["clip_high"]


@pytest.mark.parametrize(
    ("config", "rate", "length", "fraction"),
    [
        ("num_train_epochs: 1", 2e-5, 1024, 0.0),
        ("beta: 0.1\nmax_length: 300\neval_strategy: no", 1e-6, 300, 0.0),
        ("beta: 0.1\neval_strategy: steps", 1e-6, 1024, None),
    ],
)
def test_defaults_of_trl_are_written(
    run_import: Import, config: str, rate: float, length: int, fraction: float | None
) -> None:
    """Without a value of its own a configuration has its trainer's rate and length, and holds nothing out."""
    values = run_import("a.yaml", f"model_name_or_path: base\n{config}")["values"]
    assert isinstance(values, dict) and values["optimizer"]["lr"] == rate and values["vars"]["length"] == length
    assert values.get("tokens", {}).get("validation_fraction") == fraction
    assert ("padded" in str(values.get("packing"))) is (values["extends"][0] == "chat")


def test_defaults_of_adapters_are_written(run_import: Import) -> None:
    """An adapter of TRL has PEFT's targets and TRL's dropout, and a configuration without one has neither."""
    values = run_import("a.yaml", "model_name_or_path: base\nuse_peft: true\nlora_r: 8")["values"]
    assert isinstance(values, dict)
    assert values["adapters"]["lora"] == {"rank": 8, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
    assert "adapters" not in str(run_import("b.yaml", "model_name_or_path: base\nnum_train_epochs: 1")["values"])
    policy = run_import("c.yaml", "model_name_or_path: base\nuse_peft: true\nnum_generations: 8")
    assert "use_peft = True" in str(policy["unmapped"]) and "adapters" not in str(policy["values"])


def test_what_is_trained_is_not_changed_silently(run_import: Import) -> None:
    """Trained inputs are roles, other options of data sets are listed, a bare `no` of YAML turns checkpoints off."""
    data = "datasets:\n  - {path: a.jsonl, type: chat_template, roles_to_train: [tool], message_field_role: from}"
    result = run_import("a.yml", f"base_model: base\ntrain_on_inputs: true\n{data}")
    assert isinstance(result["values"], dict) and result["values"]["tokens"]["roles"].keys() > {"user", "assistant"}
    assert "'roles_to_train': ['tool'], 'message_field_role': 'from'" in str(result["unmapped"])
    result = run_import("b.yaml", "model_name_or_path: base\nsave_strategy: no")
    assert isinstance(result["values"], dict) and result["values"]["checkpoint"] == {"every": "never"}


def test_defaults_of_axolotl_are_written(run_import: Import) -> None:
    """Without a value of its own a configuration holds nothing out, and packs no rows."""
    values = run_import("a.yaml", "base_model: base\nlearning_rate: 1e-4")["values"]
    assert isinstance(values, dict) and values["tokens"] == {"validation_fraction": 0.0}
    assert values["packing"]["use"] == "data.packing.padded" and values["vars"]["length"] == 512


@pytest.mark.parametrize(
    "entry", ["split: 'train[:10%]'", "roles_to_train: [user]", "type: completion", "field_messages: conversations"]
)
def test_data_that_other_rows_or_tokens_would_train_is_listed(run_import: Import, entry: str) -> None:
    """A data set has no counterpart if axolotl reads something else than the lines' `messages`."""
    text = f"base_model: base\ndatasets: [{{path: a.jsonl, ds_type: json, {entry}}}]\n"
    result = run_import("a.yml", text)
    assert [line.partition(" ")[0] for line in result["unmapped"]] == ["datasets"]  # type: ignore[attr-defined]
    assert "paths" not in str(result["recipe"])


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("a.yml", "base_model: base\ntrain_on_inputs: true", "tokens.roles.user", 1.0),
        ("a.yml", "base_model: base\ntrain_on_inputs: false", "tokens.roles", {"assistant": 1.0}),
        ("a.yml", "model_name_or_path: base\nmax_steps: 9", "tokens.roles.user", 1.0),
        ("a.yml", "model_name_or_path: base\nassistant_only_loss: true", "tokens.roles", {"assistant": 1.0}),
        ("a.yml", "base_model: base\nwarmup_steps: 0", "lr", {"use": "learning_rate.cosine", "warmup_steps": 0}),
        ("a.yml", "base_model: base", "lr.warmup_percent", 3.0),
        ("a.yml", "model_name_or_path: base\nuse_peft: true", "adapters.lora.dropout", 0.05),
        ("a.yml", "model_name_or_path: base\nnum_generations: 4", "loss.variant", "dapo"),
        ("a.yml", "model_name_or_path: base\nnum_generations: 4\nscale_rewards: none", "advantages.scale", "none"),
        ("a.toml", "optimizer.beta1 = 0.8", "optimizer.betas", [0.8, 0.95]),
        ("a.toml", 'lr_scheduler.decay_type = "cosine"', "lr.use", "learning_rate.cosine"),
        ("a.toml", "lr_scheduler.decay_ratio = 0.5", "lr.use", "learning_rate.wsd"),
    ],
)
def test_what_is_learnt_is_as_elsewhere(run_import: Import, name: str, text: str, key: str, value: object) -> None:
    """Values and defaults that decide which tokens are learnt, and at what rate, are written."""
    values: Any = run_import(name, text)["values"]
    for part in key.split("."):
        values = values[part]
    assert values == value


def test_json_configuration_may_be_indented_by_tabs(tmp_path: Path) -> None:
    """JSON is read as JSON: YAML allows no tabs, and would read two halves of an emoji."""
    config = {"model_name_or_path": "base", "learning_rate": 2e-4, "run_name": "😀", "per_device_train_batch_size": "4"}
    (tmp_path / "sft.json").write_text(json.dumps(config, indent="\t"), "utf-8")
    assert read_config(tmp_path / "sft.json") == config | {"per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yml", "a: [1", "expected"),
        ("a.yml", "- 1", "has no keys"),
        ("a.toml", "a = ", "a.toml"),
        ("a.sh", "run --nothing 3", "no key is known"),
        ("a.sh", "run 'unclosed", "No closing quotation"),
    ],
)
def test_unreadable_configurations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    """The error names the file or the keys, without a traceback."""
    (tmp_path / name).write_text(text, "utf-8")
    assert main(["import", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_values_of_another_kind_are_listed_and_end_without_a_traceback(run_import: Import, tmp_path: Path) -> None:
    """A value that its key can't have is listed as unmapped; a size of a batch that is no number is an error."""
    text = "base_model: base\nwarmup_ratio: few\nevals_per_epoch: often\ndatasets: 5\n"
    assert run_import("odd.yml", text)["unmapped"] == [
        "warmup_ratio = 'few'",
        "evals_per_epoch = 'often'",
        "datasets = 5",
    ]
    (tmp_path / "odd.yml").write_text("base_model: base\nmicro_batch_size: few\n", "utf-8")
    assert main(["import", str(tmp_path / "odd.yml")]) == 2
