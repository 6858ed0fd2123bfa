"""Models of transformers without a family in drawloom, compared with transformers itself."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks import transformers_types
from drawloom.components.data.packing.concatenated import Concatenated
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.model.fallback.build import build_transformers_model
from drawloom.components.model.fallback.checks import run_self_check, shrink_config
from drawloom.components.model.fallback.module import SelfCheckError
from drawloom.components.model.layers import Linear
from drawloom.components.model.transformers import Transformers
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.components.ports.model import KeyValueCache, LanguageModel, LayerRange, TokenContext, find_length_fault
from drawloom.components.stages.assembly import add_model_uncast_patterns
from drawloom.components.weights.adapted import freeze_adapt_and_list_targets, materialize_and_initialize_adapters
from drawloom.components.weights.load import convert_tensors, persistent_tensors
from drawloom.graph import Every, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import check_port
from support.adapted import fill_from_seed, lora
from support.families import CLOSE, gradients
from support.qwen3 import cpu_kernels, logits_of, losses_of, one_document, pack_documents
from support.versions import needs_transformers
from support.weight_folders import fill_module_from_folder

LENGTHS = [[9, 10], [19]]
HEAD_DIM = {"hunyuan_v1_dense": {"head_dim": 16}}
"""Keys that transformers' default config lacks."""


def small_config(model_type: str, **changes: Any) -> Any:
    """Return a small config of a type in transformers."""
    from transformers import AutoConfig

    config = shrink_config(AutoConfig.for_model(model_type, **changes))
    dropout = {key: 0.0 for key in config.to_dict() if key.endswith(("dropout", "pdrop"))}
    # In transformers, a padding token's embedding has no gradient.
    return type(config).from_dict(config.to_dict() | dropout | {"vocab_size": 29, "pad_token_id": None})


def saved(folder: Path, model_type: str, **changes: Any) -> tuple[Transformers, Any]:
    """Return the component for a folder with random weights, and the model in transformers that wrote the folder."""
    torch.manual_seed(0)
    reference = build_transformers_model(small_config(model_type, **changes), "eager", experts="eager")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    reference.save_pretrained(folder)
    return Transformers(kernels=cpu_kernels(), path=folder), reference


def loaded(model: Transformers) -> Any:
    """Return the whole model with the folder's weights."""
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    fill_module_from_folder(model.path, module, model.hugging_face_mapper().inverse())
    return module


@pytest.mark.parametrize("model_type", ["phi", "gpt2", "gemma2", "glm4_moe", "gpt_oss", "starcoder2"])
@needs_transformers("5.23")  # earlier ones build float32 models
@pytest.mark.usefixtures("float64")
def test_losses_and_gradients_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Packed documents' losses, and the gradient of every parameter, equal those of each document alone."""
    model, reference = saved(tmp_path, model_type)
    model.check_before_open()
    module = loaded(model)
    tokens, targets = torch.randint(model.vocab_size, (2, 2, 19))
    losses = losses_of(module, tokens, pack_documents(LENGTHS), targets)
    alone = [
        reference(part[None]).logits[0] for row, ends in zip(tokens, LENGTHS, strict=True) for part in row.split(ends)
    ]
    expected = F.cross_entropy(torch.cat(alone), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected, **CLOSE)
    ours, theirs = dict(module.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    pairs = zip(ours, gradients(losses.sum(), ours), gradients(expected.sum(), theirs), strict=True)
    for name, actual, wanted in pairs:
        size = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(actual / size, wanted / size, **CLOSE)
        assert bool(wanted.any()), name


@pytest.mark.parametrize("model_type", ["phi3", "glm4_moe"])
def test_weights_are_read_and_written_under_the_names_on_disk(model_type: str, tmp_path: Path) -> None:
    """Parameters equal transformers', and an export has the folder's tensors, bit for bit."""
    model, reference = saved(tmp_path, model_type)
    tensors = persistent_tensors(loaded(model))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    on_disk, written = load_file(tmp_path / "model.safetensors"), convert_tensors(model.hugging_face_mapper(), tensors)
    assert on_disk.keys() == written.keys()
    assert {*model.transformers_mapper(None).outputs} == reference.state_dict().keys()
    assert all(torch.equal(on_disk[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize(
    ("model_type", "check"),
    # Zaya has norms for two tensors.
    [("bart", "layers"), ("gptj", "keyword"), ("qwen3_next", "packing"), ("zaya", "packing"), ("ctrl", "head")],
)
def test_a_type_with_other_computations_is_refused(model_type: str, check: str) -> None:
    """The error names the failed check: parts, the keyword for attention, packed documents, or the head."""
    with pytest.raises(SelfCheckError) as caught:
        run_self_check(small_config(model_type))
    assert caught.value.check == check


@needs_transformers("5.23")
def test_the_scan_has_a_result_for_every_type_and_is_in_the_documentation() -> None:
    """Verdicts found in processes equal those in the table of types, which has at least 80 types that pass."""
    rows = re.findall(r"^\| ([a-z, ]+) \| \d+: .* \| (.*) \|$", transformers_types.PAGE.read_text("utf-8"), re.M)
    documented = {name.strip("`"): result for result, names in rows for name in names.split(", ")}
    assert sorted(documented) == transformers_types.causal_types()
    assert sum(result.startswith("passes") for result in documented.values()) >= 80
    types = ["arcee", "nanochat", "bloom", "bert", "t5gemma"]
    found = {name: verdict.result for name, verdict in transformers_types.scan(types)}
    assert found.pop("t5gemma") == "build" and found == {name: documented[name] for name in found}


def test_a_refusal_names_folder_type_and_check(tmp_path: Path) -> None:
    """The user reads which check a folder's type fails, before anything is built."""
    small_config("stablelm").save_pretrained(tmp_path)
    model = Transformers(kernels=cpu_kernels(), path=tmp_path, weights=False)
    with pytest.raises(UserError, match=f"path: {tmp_path} has model_type = stablelm, .* check 'keyword' "):
        model.check_before_open()


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "glm4_moe"])
def test_two_stages_equal_the_whole_model(model_type: str, tmp_path: Path) -> None:
    """Two spans have the whole model's parameters under the same names, and its logits."""
    model, _ = saved(tmp_path, model_type)
    whole, layers = loaded(model), model.num_hidden_layers
    first, last = model.build(LayerRange(0, 1, True, False)), model.build(LayerRange(1, layers, False, True))
    for stage in (first, last):
        fill_module_from_folder(tmp_path, stage, model.hugging_face_mapper().inverse())
    names = [{name for name, _ in module.named_parameters()} for module in (first, last, whole)]
    shared_names = {f"{whole.parts.embedding}.weight"} if whole.parts.tied else set()
    assert names[0] | names[1] == names[2] and names[0] & names[1] == shared_names
    assert [len(model.blocks(stage)) for stage in (first, last)] == [1, layers - 1]
    tokens, shared = torch.randint(model.vocab_size, (2, 19)), pack_documents(LENGTHS)
    torch.testing.assert_close(logits_of(last, first(tokens, shared), shared), logits_of(whole, tokens, shared))


def test_a_model_with_work_outside_of_layers_has_one_stage_only(tmp_path: Path) -> None:
    """Every stage would apply the factor of embeddings."""
    small_config("granite", embedding_multiplier=3.0).save_pretrained(tmp_path)
    model = Transformers(kernels=cpu_kernels(), path=tmp_path, weights=False)
    model.check_before_open()
    with pytest.raises(UserError, match=r"check 'stages' .* only one pipeline stage"):
        model.build(LayerRange(0, 1, embedding=True, head=False))


def test_linear_layers_defer_gradients_and_take_adapters(tmp_path: Path) -> None:
    """Linear layers can defer weight gradients, and LoRA finds them by their names in transformers."""
    model, _ = saved(tmp_path, "phi3")
    module = loaded(model)
    linear = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    assert len(linear) == 4 * model.num_hidden_layers + 1 and all(isinstance(part, Linear) for part in linear)
    tokens, shared = torch.randint(model.vocab_size, (2, 19)), one_document(2, 19)
    before = logits_of(module, tokens, shared)
    freeze_adapt_and_list_targets([lora("qkv_proj", "*.o_proj")], module)
    materialize_and_initialize_adapters(module, torch.device("cpu"), fill_from_seed(0))
    torch.testing.assert_close(logits_of(module, tokens, shared), before)  # lora_B is 0
    trained = {name.rpartition(".")[2] for name, part in module.named_parameters() if part.requires_grad}
    assert trained == {"lora_A", "lora_B"}


def test_parameters_that_transformers_keeps_in_float32_are_not_cast(tmp_path: Path) -> None:
    """A router's weight and bias stay in float32 while layers compute in bfloat16, as in transformers."""
    from transformers import AutoModelForCausalLM  # takes seconds

    saved(tmp_path, "ernie4_5_moe")
    kinds: Any = AutoModelForCausalLM
    reference = dict(kinds.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    precision = add_model_uncast_patterns(
        DtypePolicy(compute="bfloat16"), Transformers(kernels=cpu_kernels(), path=tmp_path)
    )
    assert len(precision.uncast) == 2
    assert {name: choose_layer_dtype(name, precision) for name in reference} == {
        name: parameter.dtype for name, parameter in reference.items()
    }


@pytest.mark.parametrize(
    "model_type", ["gpt2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gemma2", "phi"))]
)
def test_it_keeps_the_contract_of_language_models(model_type: str, tmp_path: Path) -> None:
    """Among others, slices start like the whole, losses are the head's, and a text in parts is the whole text."""
    saved(tmp_path, model_type)
    check_port(lambda: Transformers(kernels=cpu_kernels(), path=tmp_path, weights=False), LanguageModel)


def test_rows_longer_than_learned_positions_are_refused(tmp_path: Path) -> None:
    """GPT-2's table has max_position_embeddings rows, and `check` compares them with rows; angles have no end."""
    for model_type, limit in (("gpt2", True), ("gemma2", False)):
        saved(tmp_path / model_type, model_type)
        model = Transformers(kernels=cpu_kernels(), path=tmp_path / model_type, weights=False)
        longest = model.max_sequence_length
        assert longest is not None and model.position_count == (longest if limit else None)
        assert not find_length_fault({"model": model}, longest)
        tokens: Any = SimpleNamespace(vocab_size=29)
        rows = Concatenated(tokens=tokens, job=tokens, length=longest + 1, models=Every({"model": model}))
        with pytest.raises(UserError, match="learned positions") if limit else nullcontext():
            rows.check_before_open()


def test_texts_longer_than_learned_positions_are_refused(tmp_path: Path) -> None:
    """A text is as long as the table at most, whole or continued with cached keys: no index error ends a command."""
    saved(tmp_path, "gpt2")
    model = Transformers(kernels=cpu_kernels(), path=tmp_path, weights=False)
    module, limit = loaded(model), model.position_count
    assert limit is not None and logits_of(module, torch.zeros(1, limit).long(), one_document(1, limit)) is not None
    with pytest.raises(UserError, match=f"table of {limit} learned positions, and a text has {limit + 1} tokens"):
        module(torch.zeros(1, limit + 1).long(), one_document(1, limit + 1))
    cache = KeyValueCache(limit + 1)
    cache.end_pass(limit)
    last = TokenContext(torch.full((1, 1), limit), torch.zeros(1, 1).long(), cache=cache)
    with pytest.raises(UserError, match=f"a text has {limit + 1} tokens"):
        module(torch.zeros(1, 1).long(), last)


def test_a_tied_table_that_exports_of_adapters_do_not_know_is_not_adapted(tmp_path: Path) -> None:
    """LoRA of GPT-2's `wte` would change its head, too, in the merged export; it matches nothing."""
    model, _ = saved(tmp_path, "gpt2")
    assert freeze_adapt_and_list_targets([lora("wte")], loaded(model)) == set()


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "starcoder2", "qwen2_moe"])
def test_norms_with_float32_weights_keep_the_dtype_of_layers(model_type: str, tmp_path: Path) -> None:
    """With `uncast` norms, layers compute in bfloat16, as exactly as without, and parameters get gradients."""
    model, _ = saved(tmp_path, model_type, **HEAD_DIM.get(model_type, {}))
    module, tokens, shared = loaded(model), torch.arange(19)[None], one_document(1, 19)
    expected = logits_of(module, tokens, shared)
    for name, parameter in module.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data = parameter.data.bfloat16()
    logits = logits_of(module, tokens, shared)
    rounded = logits_of(loaded(model).bfloat16(), tokens, shared)
    assert logits.dtype == torch.bfloat16
    assert bool((logits - expected).norm() < 1.2 * (rounded - expected).norm())
    logits.square().sum().backward()
    missing = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert all(".experts." in name for name in missing)


def test_random_weights_start_like_transformers(tmp_path: Path) -> None:
    """Norms are 1, biases 0 and matrices normal, and a slice has the values of the whole."""
    small_config("starcoder2").save_pretrained(tmp_path)
    model = Transformers(kernels=cpu_kernels(), path=tmp_path, weights=False)
    values = {}
    for name, parameter in loaded_names(model):
        values[name] = torch.empty(parameter.shape)
        model.initialize_parameter(name, values[name], 3)
    assert bool((values["model.layers.1.input_layernorm.weight"] == 1).all())
    assert bool((values["model.layers.1.self_attn.q_proj.bias"] == 0).all())
    assert 0.01 < float(values["model.layers.1.mlp.c_fc.weight"].std()) < 0.03


def loaded_names(model: Transformers) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of the whole model by name."""
    span = LayerRange.of_whole_model(model.num_hidden_layers)
    return list(model.build(span).named_parameters())


def test_a_native_family_is_recommended(tmp_path: Path) -> None:
    """If drawloom has the folder's family, a warning recommends the faster component."""
    config = small_config("llama")
    config.vocab_size = 300
    config.save_pretrained(tmp_path)
    words = ("model.use=model.transformers", f"model.path={tmp_path}", "model.weights=false")
    problems = [str(problem) for problem in Recipe.load("first_run", *words).check()]
    [warning] = [text for text in problems if "model.llama" in text]
    assert "warning" in warning and 'write use = "model.auto"' in warning
