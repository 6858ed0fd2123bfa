"""Completions sampled by a server: a real HTTP server over a small model of ours."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.ports.rollouts import Completions, Prompts
from drawloom.components.rollouts.server import CompletionServer, ServerRollouts
from drawloom.graph import UserError
from drawloom.graph.project import Recipe
from support.completion_server import ServedModel, serve
from support.observers_of_runs import TINY

NEW = 5
END = 256
LENGTHS = [2, 5, 3, 2]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedModel]:
    with serve() as model:
        yield model


@pytest.fixture(scope="module")
def sampler(server: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield the sampler of an open run, whose small random model has distributions far from uniform."""
    values: dict[str, Any] = {
        "vars": {"base": "unused"},
        "run": {"name": "tiny", "folder": str(tmp_path_factory.mktemp("run"))},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY, "initializer_range": 0.3},
        "rollouts": {"use": "rollouts.server", "max_tokens": NEW, "url": server.url},
    }
    with Recipe.load("grpo").with_values(values).open(["rollouts"]) as objects:
        yield objects["rollouts"]


@pytest.fixture(autouse=True)
def without_faults(server: ServedModel) -> Iterator[None]:
    yield
    server.fault, server.change, server.is_raw = (lambda path, body: None), (lambda choice: choice), False
    server.requests.clear()


def make_prompts(keys: list[int]) -> Prompts:
    tokens = torch.tensor([[48, 62, 7, 7, 7], [51, 49, 52, 57, 62], [57, 57, 62, 7, 7], [48, 62, 7, 7, 7]])
    return Prompts(tokens, torch.tensor(LENGTHS), torch.tensor(keys))


def sample(sampler: Any, *prompts: Prompts, step: int = 1, **changes: Any) -> list[Completions]:
    """Return completions from a sampler with other settings, without retries unless they say so."""
    other: ServerRollouts = attrs.evolve(sampler, **{"retries": 0, **changes})
    other.open()
    return other.sample(prompts, "train", step)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_those_of_the_exported_policy(
    sampler: Any, server: ServedModel, temperature: float
) -> None:
    """Prompts come back, followed by sampled tokens with the log-probabilities of the model at the temperature."""
    (completions,) = sample(sampler, make_prompts([0, 1, 2, 3]), temperature=temperature)
    with torch.no_grad():
        whole = (server.logits(completions.tokens) / temperature).log_softmax(-1)
    following = torch.cat([completions.tokens[:, 1:], completions.tokens[:, :1]], 1)
    expected = whole.gather(-1, following[..., None])[..., 0].where(completions.is_target, 0.0)
    torch.testing.assert_close(completions.logps, expected, atol=1e-4, rtol=1e-4)
    for row, length in enumerate(LENGTHS):
        first, last = int(completions.starts[row]), int(completions.ends[row])
        assert first == length and completions.tokens[row, :first].equal(make_prompts([0] * 4).tokens[row, :first])
        assert bool(completions.is_ended[row]) == (int(completions.tokens[row, last - 1]) == END)
        assert last - first == NEW or completions.is_ended[row]
        assert (completions.tokens[row, last:] == END).all()


def test_a_row_is_drawn_by_its_key_alone(sampler: Any) -> None:
    """Rows in other microbatches are the same; another key or step draws others."""
    (together,) = sample(sampler, make_prompts([5, 3, 9, 4]))
    alone = Prompts(make_prompts([0] * 4).tokens[1:2], torch.tensor([5]), torch.tensor([3]))
    (part,) = sample(sampler, alone)
    assert part.tokens[0].equal(together.tokens[1])
    assert not together.tokens[0].equal(together.tokens[3])  # the same prompt with another key
    for other in (sample(sampler, make_prompts([1, 2, 6, 7])), sample(sampler, make_prompts([5, 3, 9, 4]), step=2)):
        assert not other[0].tokens.equal(together.tokens)


def test_a_row_ends_at_its_own_end_ids(sampler: Any, server: ServedModel) -> None:
    """A request names all ends of its row, and a completion with any of them is ended."""
    (plain,) = sample(sampler, make_prompts([0, 1, 2, 3]))
    token = int(plain.tokens[1, plain.starts[1] + 1])
    server.requests.clear()
    ends = (frozenset({END}), frozenset({END, token}), frozenset({END}), frozenset({END}))
    (cut,) = sample(sampler, attrs.evolve(make_prompts([0, 1, 2, 3]), end_ids=ends))
    stops = [body["stop_token_ids"] for path, body in server.requests if path == "/v1/completions"]
    assert sorted(stops) == sorted([[END], sorted([END, token]), [END], [END]])
    assert int(cut.ends[1] - cut.starts[1]) <= 2 and cut.is_ended[1] and int(cut.tokens[1, cut.ends[1] - 1]) == token
    assert cut.tokens[0].equal(plain.tokens[0])


def test_completions_of_a_prompt_share_a_request(sampler: Any, server: ServedModel) -> None:
    """
    Consecutive rows of one prompt are choices of one request, and differ; each row has its own log-probabilities.

    The server sends choices in another order.
    """
    tokens, lengths = torch.tensor([[48, 62]] * 5 + [[57, 62]]), torch.full((6,), 2)
    prompts = Prompts(tokens, lengths, torch.arange(6))
    server.requests.clear()
    (completions,) = sample(sampler, prompts, rows_per_request=3)
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert sorted((body["n"], body["prompt"]) for body in asked) == [(1, [57, 62]), (2, [48, 62]), (3, [48, 62])]
    assert len({tuple(row.tolist()) for row in completions.tokens[:5]}) > 2
    whole = server.logits(completions.tokens).log_softmax(-1)
    following = torch.cat([completions.tokens[:, 1:], completions.tokens[:, :1]], 1)
    expected = whole.gather(-1, following[..., None])[..., 0].where(completions.is_target, 0.0)
    torch.testing.assert_close(completions.logps, expected, atol=1e-4, rtol=1e-4)
    body = next(body for body in asked if body["n"] == 3)
    first = server.complete(body, torch.Generator().manual_seed(body["seed"]))
    assert completions.tokens[0, 2 : 2 + len(first["token_ids"])].tolist() == first["token_ids"]


class Listed:
    """Turns with a message of two tokens for every second key, once, and end after it; `asked` are the turns."""

    def __init__(self) -> None:
        self.asked: dict[int, list[list[int]]] = {}

    def restart_rows(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.asked.pop(key, None)

    def continue_rows(self, keys: Sequence[int], turns: Sequence[Sequence[int]]) -> list[list[int] | None]:
        for key, turn in zip(keys, turns, strict=True):
            self.asked.setdefault(key, []).append([*turn])
        return [[65, 66] if len(self.asked[key]) == 1 and key % 2 else None for key in keys]


def sample_turns(sampler: Any, **changes: Any) -> tuple[Completions, Listed]:
    """Sample rows whose turns end at many tokens."""
    turns, ends = Listed(), frozenset({END, *range(0, 256, 2)})
    prompts = attrs.evolve(make_prompts([0, 1, 2, 3]), end_ids=(ends,) * 4, turns=turns)
    (completions,) = sample(sampler, prompts, max_tokens=9, **changes)
    return completions, turns


def test_a_turn_goes_on_from_the_ids_that_were_sampled(sampler: Any, server: ServedModel) -> None:
    """
    The second request of a row has the first one's ids and the message, and another seed; these ids come back.

    Log-probabilities are a whole pass's, and the message has none.
    """
    server.requests.clear()
    completions, turns = sample_turns(sampler)
    prompts = [body["prompt"] for path, body in server.requests if path == "/v1/completions"]
    assert len({body["seed"] for path, body in server.requests if path == "/v1/completions"}) == len(prompts)
    again = [key for key in (1, 3) if turns.asked.get(key)]
    assert again and len(prompts) == 4 + len(again)
    for key in again:
        start = make_prompts([0] * 4).tokens[key, : LENGTHS[key]].tolist()
        longer = [*start, *turns.asked[key][0], 65, 66]
        assert longer in prompts and completions.tokens[key, : len(longer)].tolist() == longer
        kinds = [part.kind for part in completions.list_segments(key)]
        assert kinds == ["prompt", "sampled", "environment", "sampled"]
    whole = server.logits(completions.tokens).log_softmax(-1)
    following = torch.cat([completions.tokens[:, 1:], completions.tokens[:, :1]], 1)
    expected = whole.gather(-1, following[..., None])[..., 0].where(completions.is_target, 0.0)
    torch.testing.assert_close(completions.logps, expected, atol=1e-4, rtol=1e-4)


RESTARTS = ("a restart", "a restart while the weights are loaded", "a restart between requests")


@pytest.mark.parametrize("kind", ["HTTP 503", "no answer", *RESTARTS])
def test_a_fault_costs_a_retry_and_no_sample(
    sampler: Any, server: ServedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    After HTTP 5xx, a hang, or a restart with other weights, rows equal a faultless server's.

    A restart between requests is noticed by the version of the weights.

    The weights are sent again before the next request, and a conversation that was cut off begins again.
    """
    monkeypatch.setattr("drawloom.components.rollouts.server.FIRST_WAIT", 0.01)
    expected, turns = sample_turns(sampler)
    seen: list[str] = []

    def fail(path: str, body: Any) -> tuple[int, Any] | None:
        seen.append(path)
        due = {"/v1/completions": 5, "/collective_rpc": 2 if "loaded" in kind else 0}
        if seen.count(path) != due.get(path):
            return None
        if kind == "no answer":
            time.sleep(0.6)
        elif "restart" in kind:
            server.restart()
            if "between" in kind:
                return None
            raise ConnectionError("the server restarts")  # which closes the connection without an answer
        return 503, {"message": "starting"}

    server.fault = fail
    completions, again = sample_turns(sampler, retries=3, connections=1, timeout=0.3 if kind == "no answer" else 300.0)
    assert seen.count("/collective_rpc") >= 2 and seen.count("/v1/completions") > 5
    for name in ("tokens", "ends", "is_ended", "is_sampled"):
        assert getattr(completions, name).equal(getattr(expected, name)), name
    torch.testing.assert_close(completions.logps, expected.logps)
    assert again.asked == turns.asked
    server.fault = lambda path, body: (503, {"message": "gone"}) if path == "/v1/completions" else None
    with pytest.raises(UserError, match=r"HTTP 503: .*gone"):
        sample_turns(sampler, retries=1)


class Gated(Listed):
    """Turns waiting for `gate` before their messages."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def continue_rows(self, keys: Sequence[int], turns: Sequence[Sequence[int]]) -> list[list[int] | None]:
        assert self.gate.wait(60)
        return super().continue_rows(keys, turns)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_segment_has_the_version_it_was_sampled_with(sampler: Any, server: ServedModel, in_flight: bool) -> None:
    """
    With `in_flight`, turns after an update are sampled with the new weights, as their versions say; otherwise the
    update waits for the conversations. Log-probabilities are of the version's weights.
    """
    other: ServerRollouts = attrs.evolve(sampler, retries=0, max_tokens=9, in_flight=in_flight)
    other.open()
    norm = sampler.export.stages.local[0].module.get_parameter("model.norm.weight")
    before, turns, ends = norm.detach().clone(), Gated(), frozenset({END, *range(0, 256, 2)})
    prompts = attrs.evolve(make_prompts([0, 1, 2, 3]), end_ids=(ends,) * 4, turns=turns)
    other.update_weights("train", 1)
    wait = other.start_sampling([prompts], "train", 1)
    with torch.no_grad():
        norm.mul_(0.5)
    if in_flight:
        other.update_weights("train", 2)
        turns.gate.set()
        (completions,) = wait()
    else:
        threading.Timer(0.5, turns.gate.set).start()
        other.update_weights("train", 2)
        assert turns.gate.is_set()
        (completions,) = wait()
    seen = set()
    for version in (1, 0):
        whole = server.logits(completions.tokens).log_softmax(-1)
        following = torch.cat([completions.tokens[:, 1:], completions.tokens[:, :1]], 1)
        expected = whole.gather(-1, following[..., None])[..., 0]
        for row in range(4):
            for number, part in enumerate(completions.list_segments(row)[1::2]):
                assert completions.versions[row, part.first] == (number if in_flight else 0)
                if completions.versions[row, part.first] == version:
                    seen.add(version)
                    span = slice(part.first - 1, part.last - 1)
                    torch.testing.assert_close(completions.logps[row, span], expected[row, span], atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            norm.copy_(before)
        other.update_weights("train", 3)
    assert seen == ({0, 1} if in_flight else {0})


def read_norm(server: ServedModel) -> float:
    """Return a weight of the served model's last norm."""
    assert server.module is not None
    return server.module.get_parameter("model.norm.weight")[0].item()


def test_the_servers_weights_follow_the_policy_at_the_lag(sampler: Any, server: ServedModel) -> None:
    """
    With `update_every = 2` the server has the weights of steps 1 and 3, also after an evaluation in between.

    The evaluation has the current weights. A sampler with the state from after step 3, as in a resumed run, has the
    weights of step 3 at step 4 and the current ones at step 5.
    """
    lagging: ServerRollouts = attrs.evolve(sampler, update_every=2)
    lagging.open()
    bias = sampler.export.stages.local[0].module.get_parameter("model.norm.weight")
    before = bias.detach().clone()
    seen: list[float] = []
    for purpose, step in [("train", 1), ("validation", 0), ("train", 2), ("train", 3), ("train", 4)]:
        with torch.no_grad():
            bias.fill_(float(len(seen)))
        lagging.update_weights(purpose, step)
        seen.append(read_norm(server))
    assert seen == [0.0, 1.0, 0.0, 3.0, 3.0]
    routes = [path for path, _ in server.requests]
    update = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert routes == ["/v1/models", *["/weight_info", *update, "/weight_info"] * 4]
    state = {**(whole := lagging.state_dict()), "files": {name: x.clone() for name, x in whole["files"].items()}}
    lagging.close()
    assert not (sampler.folder.folder / "policy").exists()
    assert all(x.equal(state["files"][name]) for name, x in whole["files"].items())  # still mapped
    again: ServerRollouts = attrs.evolve(sampler, update_every=2)
    again.open()
    again.load_state_dict(state)
    for step, expected in ((4, 3.0), (5, 9.0)):
        with torch.no_grad():
            bias.fill_(9.0)
        again.update_weights("train", step)
        assert read_norm(server) == expected
    again.load_state_dict({})
    again.update_weights("train", 6)
    assert again.state_dict()["step"] == 6 and attrs.evolve(sampler, update_every=1).state_dict() == {}
    again.close()
    assert not (sampler.folder.folder / "policy").exists()
    with torch.no_grad():
        bias.copy_(before)


def test_another_servers_requests_are_settings(sampler: Any, server: ServedModel) -> None:
    """The requests of an update are sent in order, with the exported folder's path."""
    server.fault = lambda path, body: (200, {"success": True}) if "disk" in path or "flush" in path else None
    kind = type(sampler.reload[0])
    calls = [kind(path="/update_weights_from_disk", body={"model_path": "{folder}"}), kind(path="/flush_cache")]
    other: ServerRollouts = attrs.evolve(sampler, reload=calls, version_path="")
    other.open()
    other.update_weights("validation", 0)
    folder = str(sampler.folder.folder.absolute() / "policy/validation")
    assert server.requests[1:] == [("/update_weights_from_disk", {"model_path": folder}), ("/flush_cache", None)]


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    """Return a change that leaves fields out of an answer."""
    return lambda choice: {key: value for key, value in choice.items() if key not in names}


def with_logprobs(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change of an answer's log-probabilities."""
    return lambda choice: {**choice, "logprobs": {**choice["logprobs"], **fields}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without("logprobs"), "it has no finite log-probability for each token; allow logprobs"),
        (with_logprobs(token_logprobs=[float("nan")]), "it has no finite log-probability"),
        (lambda choice: {"logprobs": {"tokens": ["a"]}}, "it has no token ids; use a server with return_token_ids"),
        (lambda choice: {**choice, "token_ids": [1]}, "1 token ids and . log-probabilities; update the server"),
        (lambda choice: {**choice, "token_ids": []}, "0 token ids and . log-probabilities; update the server"),
        (
            lambda choice: {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}},
            "a completion ends after 1 of 5 tokens with the token 7, not with 256; correct the tokenizer's end token",
        ),
        (
            lambda choice: {"token_ids": [999, END], "logprobs": {"token_logprobs": [-1.0, -1.0]}},
            "the server sampled the token 999, and the policy has 257; let the server start from the same model",
        ),
    ],
)
def test_unusable_answers_end_in_one_message(
    sampler: Any, server: ServedModel, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    """An answer without ids or log-probabilities, or with another end, is refused with a remedy."""
    server.change = change
    with pytest.raises(UserError, match=text):
        sample(sampler, make_prompts([0, 1, 2, 3]))


def test_ids_are_read_from_names_of_tokens(sampler: Any, server: ServedModel) -> None:
    """A server without `token_ids` has them in the names of tokens, token_id:7."""
    (expected,) = sample(sampler, make_prompts([0, 1, 2, 3]))
    server.change = without("token_ids")
    (completions,) = sample(sampler, make_prompts([0, 1, 2, 3]))
    assert completions.tokens.equal(expected.tokens) and completions.logps.equal(expected.logps)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/completions", 400, r"HTTP 400: .*too long.*; see max_tokens, and the server's maximum length"),
        ("/v1/completions", 500, "HTTP 500: .*; read the server's log"),
        ("/v1/models", 401, "HTTP 401: .*; set the environment variable OPENAI_API_KEY"),
        ("/collective_rpc", 404, "HTTP 404: .*; .* start vLLM with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_refusing_server_ends_in_one_message(
    sampler: Any, server: ServedModel, path: str, status: int, text: str
) -> None:
    """The message has the address, the status, the server's words, and a remedy."""
    server.fault = lambda route, body: (status, {"message": "too long a row"}) if route == path else None
    with pytest.raises(UserError, match=f"{server.url}{path}: {text}"):
        sample(sampler, make_prompts([0, 1, 2, 3]))


def test_a_missing_server_or_model_ends_in_one_message(sampler: Any, server: ServedModel) -> None:
    """A server that is down, is slow, has other models, or ignores the temperature, is named."""
    with serve() as gone:
        url = gone.url
    prompts = make_prompts([0, 1, 2, 3])
    with pytest.raises(UserError, match=f"{url}/v1/models: .* refused; start the server, or correct url"):
        sample(sampler, prompts, url=url)
    with pytest.raises(
        UserError, match="there is no model 'other', and the served ones are: policy; write served_model"
    ):
        sample(sampler, prompts, served_model="other")
    server.is_raw = True
    with pytest.raises(
        UserError, match=r"are those of temperature 1, and not of 0\.5; start vLLM with --logprobs-mode"
    ):
        sample(sampler, prompts, temperature=0.5)
    with server.lock, pytest.raises(UserError, match=r"/v1/models: no answer within 0\.1 s; raise timeout, or read"):
        CompletionServer(server.url, 0.1).find_served_model_name(None)
