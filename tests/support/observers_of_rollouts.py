"""Observers for reinforcement learning settings; used by test_settings."""

import json
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.phases.advantages import Advantages
from drawloom.components.ports.data import MovableData, ValidationData
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.rollouts import Answer, Completions, PolicyBatch, PromptBatch, Prompts, Reply, Scored
from drawloom.components.ports.run import Batching, Events, RunFolder, RunInfo, Step
from drawloom.graph import Ordered, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import build, fake
from support.chat import say, tokenizer_folder
from support.checkpoints import SingleRankMesh
from support.completion_server import get_shared_server
from support.doubles import Machine
from support.faulty_tools import echo, fail
from support.losses import sample
from support.observers_of_runs import TINY
from support.qwen3 import dense
from support.verifiers_package import importable

Values = dict[str, Any]


def policy_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return the loss, its weight and its named sums, on another policy's samples."""
    inputs = sample()
    tensors: Values = {name: tensor for name, _, tensor in inputs.batch.named_tensors()}
    zeros = torch.zeros(3, 5)
    zeros[0, 3:] = -9.0
    advantages = torch.tensor([[1.0], [-1.0], [2.0]]).expand(3, 5)
    batch = PolicyBatch(**tensors, logps=zeros - 2.0, advantages=advantages)
    loss = build(use, **values)
    if loss.reference != "none":
        batch = loss.with_reference(batch, zeros - 1.0)
    total, weight, sums = loss.loss(inputs.hidden, inputs.head(), batch)
    return total.item(), weight.item(), {name: value.item() for name, value in sums.items()}


def distill_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return a distillation loss from two likely tokens and the rest, or from a teacher's other hidden states."""
    inputs = sample()
    logps = torch.tensor([0.5, 0.3, 0.2]).log().expand(3, 5, 3)
    batch = inputs.batch.evolve(teacher_ids=torch.tensor([1, 4]).expand(3, 5, 2), teacher_logps=logps)
    loss = build(use, **values)
    batch = loss.with_reference(batch, loss.reference_values(inputs.hidden.detach().flip(2), inputs.head(), batch))
    return loss.loss(inputs.hidden, inputs.head(), batch)[0].item()


def teacher_of(use: str, values: Values, place: Path) -> Any:
    """Return the predictions that a folder has for a row."""
    for number, name in enumerate(("one_teacher", "other_teacher")):
        folder = place / name
        folder.mkdir()
        (folder / "train.ids").write_bytes(np.full(1, number, np.int32).tobytes())
        (folder / "train.logps").write_bytes(np.zeros(2, np.float16).tobytes())
        (folder / "teacher.json").write_text('{"rows": {}, "length": 1, "top_k": 1}')
    ids, logps = build(use, path=place / values["path"]).read_top_ids_and_logps("train", [0])
    return ids.tolist(), logps.tolist()


def reward_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return a reward model's loss on pairs."""
    inputs = sample()
    model = fake(LanguageModel, hugging_face_config={"hidden_size": 8})
    loss = build(use, model=model, mesh=SingleRankMesh(), **values)
    loss.module.to_empty(device="cpu")
    torch.nn.init.ones_(loss.module.weight)
    if "head" in values:
        loss.module.reset_parameters()
    batch = inputs.batch.evolve(document_ids=torch.tensor([[0, 0, 0, 1, 1]]).expand(3, -1))
    return loss.loss(inputs.hidden, inputs.head(), batch)[0].item()


def further_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return a loss for further tokens, and its named sums."""
    inputs = sample()
    model = dense(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    loss = build(use, model=model, mesh=SingleRankMesh(), **values)
    loss.check_before_open()
    loss.module.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in loss.module.parameters():
        torch.nn.init.normal_(parameter)
    hidden = inputs.hidden.float(), {0: inputs.hidden.float()}
    total, weight, sums = loss.loss(hidden, inputs.head(), inputs.batch)
    return total.item(), weight.item(), {name: value.item() for name, value in sums.items()}


def classification_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return a classifier's loss on three documents of label 0."""
    inputs = sample()
    model = fake(LanguageModel, hugging_face_config={"hidden_size": 8})
    loss = build(use, model=model, mesh=SingleRankMesh(), **values)
    loss.module.to_empty(device="cpu")
    loss.module.reset_parameters()
    torch.nn.init.ones_(loss.module.weight)
    batch = inputs.batch.evolve(document_ids=torch.zeros(3, 5, dtype=torch.int64), labels=torch.zeros(3, 5))
    return loss.loss(inputs.hidden, inputs.head(), batch)[0].item()


def judged_loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return a loss on one good and two bad answers, and its named sums."""
    inputs = sample()
    weights = torch.full((3, 5), 0.2)
    labels = torch.zeros(3, 5)
    labels[:, 0] = torch.tensor([1.0, -1.0, -1.0])
    changes: Values = {"weights": weights, "labels": labels, "reference": torch.full((3, 5), -2.0)}
    batch = inputs.batch.evolve(document_ids=torch.tensor([[0, 0, 0, 1, 1]]).expand(3, -1), **changes)
    loss = build(use, **values)
    batch = loss.with_step_sums(
        batch, loss.compute_part_of_step_sums(inputs.hidden.detach(), inputs.head(), batch).detach()
    )
    total, weight, sums = loss.loss(inputs.hidden, inputs.head(), batch)
    return total.item(), weight.item(), {name: value.item() for name, value in sums.items()}


def scores_of(use: str, values: Values, _place: Path) -> Any:
    """Return a reward's weight and its scores for some texts."""
    example = {"answer": "12", "other": "13", "tests": "assert x == 1", "wrong": "assert x == 2"}
    example["more"] = "import time; time.sleep(0.3); del x"
    texts = ("12", "13", "13.1", "a12", "[1]", "x = 1", "x = bytearray(10**8) and 1")
    reward = build(use, **values)
    answers = [Answer(text, count, True, example) for count, text in enumerate(texts, 3)]
    answers += [Answer("cut", 3, False, example, reward=0.5), Answer("12", 3, True, example, reward=1.0, faults=2)]
    return reward.weight, reward.scores(answers)


def encode_prompts(use: str, values: Values, place: Path) -> Any:
    """Return the ids for a prompt with messages."""
    tokenizer = HuggingFaceTokenizer(path=tokenizer_folder(place / "tokenizer"))
    tokenizer.open()
    collator = build(use, tokenizer=tokenizer, **values)
    try:
        return collator.collate([{"prompt": say("hello")}], 99).tokens.tolist()
    finally:
        collator.close()


def encode_messages_as_prompt(use: str, values: Values, folder: Path) -> Any:
    """Return the ids for a user's message, and the ids at the end of an answer."""
    tokenizer = HuggingFaceTokenizer(path=tokenizer_folder(folder / "tokenizer"))
    tokenizer.open()
    with closing(build(use, tokenizer=tokenizer, **values)) as prompts:
        return prompts.encode_messages_as_prompt(say("hello")).tolist(), prompts.answer_end_ids


def digits_of(use: str, values: Values, _place: Path) -> Any:
    """Return both splits' examples."""
    task = build(use, tokenizer=Bytes(), job=_job(), **values)
    task.open()
    return task.examples("train"), task.examples("validation")


def advantages_of(use: str, values: Values, _place: Path) -> Any:
    """Return weights and advantages for two groups, one with equal rewards; one completion was cut."""
    tokens, starts = torch.zeros(6, 4, dtype=torch.int64), torch.ones(6, dtype=torch.int64)
    ends = torch.tensor([2, 3, 4, 2, 3, 4])
    completions = Completions(tokens, starts, ends, torch.zeros(6, 4), torch.zeros(6, 4), ends < 4)
    totals = torch.tensor([0.0, 0.5, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    step = Step(1, 1)
    step.state["rollouts"] = [Scored(completions, 3, ("r",), totals[:, None], totals)]
    build(use, **values).run_phase(step)
    (batch,) = step.state["batches"]
    return batch.weights.tolist(), batch.advantages.tolist()


def record_steps(use: str, values: Values, folder: Path) -> Any:
    """Record five steps with two completions, and return the numbers of completions by step."""
    folder.mkdir(exist_ok=True)
    one, tokens = torch.ones(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    completions = Completions(tokens, one, one + 1, torch.zeros(2, 2), torch.zeros(2, 2), one > 0)
    totals = torch.zeros(2, dtype=torch.float64)
    record = build(use, folder=fake(RunFolder, folder=folder), mesh=SingleRankMesh(), tokenizer=Bytes(), **values)
    for index in range(1, 6):
        step = Step(index, 5)
        step.state["rollouts"] = [Scored(completions, 2, ("r",), totals[:, None], totals)]
        Advantages().run_phase(step)
        record.run_phase(step)
    record.close()
    lines = map(json.loads, (folder / "rollouts.jsonl").read_text("utf-8").splitlines())
    return {line["step"]: len(line["completions"]) for line in lines}


class Ends:
    """A sampler that returns only end tokens; `rows` counts them."""

    temperature = 1.0

    def __init__(self) -> None:
        self.rows = 0

    def update_weights(self, purpose: str, step: int) -> None:
        pass

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        return [self._complete(part) for part in prompts]

    def _complete(self, prompts: Prompts) -> Completions:
        rows = len(prompts.tokens)
        self.rows += rows
        zeros = torch.zeros(rows, 2)
        ones = torch.ones(rows, dtype=torch.int64)
        return Completions(torch.full((rows, 2), 256), ones, ones + 1, zeros, zeros, ones > 0)


class Fixed:
    """A reward of 1 for everything."""

    weight = 1.0

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [1.0] * len(answers)


def rollouts_of(use: str, values: Values, _place: Path) -> Any:
    """Return, by step, the completions sampled so far, the values of the phase, and its stale completions."""
    batch = PromptBatch(torch.full((1, 1), 65), torch.ones(1, dtype=torch.int64), torch.ones(1), examples=({},))
    sampler = Ends()
    is_training = use == "phases.rollout"
    data = fake_data(batch, is_training)
    rewards = Ordered([Fixed()], ["fixed"]) if is_training else {"fixed": Fixed()}
    positions = {"first_row_position": lambda step: step - 1, "microbatch_row_positions": lambda step: [[step - 1]]}
    batching = fake(Batching, dp_size=1, **positions)
    edges: Values = {"events": fake(Events)} if is_training else {"device": Machine()}
    edges |= {"rollouts": sampler, "tokenizer": Bytes(), "mesh": SingleRankMesh(), "rewards": rewards}
    phase = build(use, data=data, batching=batching, **edges, **values)
    phase.open()
    if not is_training:
        phase.after_restore(0)
    seen = []
    for index in range(1, 5):
        step = Step(index, 4)
        phase.run_phase(step)
        stale = sum(int(part.is_stale.sum()) for part in step.state.get("rollouts", []))
        seen.append((sampler.rows, sorted(step.state), stale))
    return seen


def fake_data(batch: PromptBatch, is_training: bool) -> Any:
    """Return training data or validation data with one batch."""
    if is_training:
        return fake(MovableData, next_step=lambda: [batch])
    return fake(ValidationData, batches=lambda: iter([batch]))


def completions_of(use: str, values: Values, place: Path) -> Any:
    """Return tokens and log-probabilities sampled by a small run's stages."""
    tables: Values = {
        "vars": {"base": "unused"},
        "run": {"name": "small", "folder": str(place / "run")},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY, "initializer_range": 0.3},
        "rollouts": {"use": use, **values},
    }
    with Recipe.load("grpo").with_values(tables).open(only="rollouts") as objects:
        prompts = Prompts(torch.full((1, 3), 65), torch.tensor([3]), torch.tensor([0]))
        (completions,) = objects["rollouts"].sample([prompts], "train", 1)
        return completions.tokens.tolist(), completions.logps.tolist()


def replies_of(use: str, values: Values, _place: Path) -> Any:
    """Return a tool environment's replies to calls, one of them slow and one of them large."""
    environment = build(use, tools=Ordered([echo(), fail()]), **values)
    environment.open()
    calls = [{"text": "a", "times": 4}, {"text": "a", "times": 3 * 10**8}]
    texts = [f'<tool_call>{{"name": "echo", "arguments": {json.dumps(call)}}}</tool_call>' for call in calls]
    slow = '<tool_call>{"name": "fail", "arguments": {"text": "slow"}}</tool_call>'
    with closing(environment):
        return [(reply.message[:50], [*reply.faults]) for reply in map(environment.step, [*texts, slow, "[echo b]"])]


def verifiers_replies_of(use: str, values: Values, _place: Path) -> Any:
    """Return the names of an environment's tools and its reply to an answer."""
    with importable("stand-in"), closing(build(use, **values)) as environment:
        reply = environment.reset({"prompt": "1+2=", "answer": "3", "info": {}}).step("3")
        return [schema["function"]["name"] for schema in environment.tool_schemas], reply


def slow_verifiers_reply_of(use: str, values: Values, _place: Path) -> Any:
    """Return an environment's reply to a slow call, or None if the environment has ended."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    with importable("stand-in"), closing(build(use, **values)) as environment:
        try:
            return environment.reset({"prompt": "1+2=", "answer": "3", "info": {"fault": "slow"}}).step(call)
        except RuntimeError:
            return None


class Endless:
    """An environment that has an empty message for each turn."""

    tool_schemas = ()

    def reset(self, example: Any) -> "Endless":
        return self

    def step(self, text: str) -> Reply:
        time.sleep(0.02)
        return Reply("")


class TwoTurns(Ends):
    """A sampler that asks for two more turns."""

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        for part in prompts:
            assert part.turns is not None
            for _ in range(2):
                part.turns.continue_rows(part.keys.tolist(), [[256]] * len(part.keys))
        return super().sample(prompts, purpose, step)


def turns_of(use: str, values: Values, _place: Path) -> Any:
    """Return the faults of conversations with an environment that never ends them."""
    nodes: Values = {"sampler": TwoTurns(), "environment": Endless(), "tokenizer": Bytes(), "mesh": SingleRankMesh()}
    rollouts = build(use, **nodes, **values)
    rollouts.open()
    prompts = Prompts(torch.full((1, 1), 65), torch.tensor([1]), torch.tensor([0]), examples=({},))
    (completions,) = rollouts.sample([prompts], "train", 1)
    return completions.turns.tolist(), completions.faults.tolist()


def retries_of(use: str, values: Values, folder: Path) -> Any:
    """Return how often a server that fails is sent the weights."""
    server = get_shared_server()
    with suppress(UserError):
        server_of(use, values, folder, lambda path, body: (503, None) if path == "/v1/completions" else None)
    return [path for path, _ in server.requests].count("/collective_rpc")


def exchange_of(use: str, values: Values, folder: Path) -> Any:
    """Return whether a request for completions follows the requests of a later update."""
    server = get_shared_server()
    server.fault = lambda path, body: time.sleep(0.05) if path == "/v1/completions" else None
    rollouts = {"use": use, "url": server.url, "connections": 1, **values}
    tables: Values = {
        "vars": {"base": "unused"},
        "run": {"name": "small", "folder": str(folder / "run")},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY},
        "rollouts": rollouts,
        "rollout": {"lag": 1},
    }
    with Recipe.load("grpo").with_values(tables).open(only="rollouts") as objects:
        prompts = Prompts(torch.full((6, 3), 65), torch.full((6,), 3), torch.arange(6))
        objects["rollouts"].update_weights("train", 1)
        server.requests.clear()
        wait = objects["rollouts"].start_sampling([prompts], "train", 1)
        objects["rollouts"].update_weights("train", 2)
        wait()
    paths = [path for path, _ in server.requests]
    return paths.index("/collective_rpc") < max(index for index, path in enumerate(paths) if path == "/v1/completions")


def server_of(use: str, values: Values, folder: Path, fault: Any = None) -> Any:
    """Return completions by a server, the routes of two steps, and whether requests overlapped."""
    server = get_shared_server()
    server.requests.clear()
    server.most_waiting = 0
    server.fault = fault or (lambda path, body: time.sleep(0.03) if path == "/v1/completions" else RELOADS.get(path))
    tables: Values = {
        "vars": {"base": "unused"},
        "run": {"name": "small", "folder": str(folder / "run")},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY, "initializer_range": 0.3},
        "rollouts": {"use": use, "url": server.url, **values},
    }
    with Recipe.load("grpo").with_values(tables).open(only="rollouts") as objects:
        prompts = Prompts(torch.full((4, 3), 65), torch.full((4,), 3), torch.arange(4))
        for step in (1, 2):
            objects["rollouts"].update_weights("train", step)
            (completions,) = objects["rollouts"].sample([prompts], "train", step)
    # A path is another one in every folder, and requests for rows come in any order.
    named = ("/v1/completions", "/update_weight_version")  # versions are random
    sent = [(path, str(body).replace(str(folder), "")) for path, body in server.requests if path not in named]
    return completions.tokens.tolist(), completions.logps.tolist(), sent, server.most_waiting > 1


RELOADS = {"/update_weights_from_disk": (200, None)}
"""Another server's answers to the requests of an update."""


def _job() -> Any:
    return fake(RunInfo, seed=3)
