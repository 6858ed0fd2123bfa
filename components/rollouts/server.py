"""Completions sampled by a separate inference server, whose weights follow the policy."""

import base64
import http.client
import io
import json
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import attrs
import numpy
import torch
from torch import Tensor

from drawloom import NodeView, Problem, UserError, above, at_least, between, component, internal, setting
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.distributed.rng import derive_seed
from drawloom.components.storage.temp_folders import remove_folder_atomically
from drawloom.ports import (
    MAX_LENGTH,
    Completions,
    Group,
    LanguageModel,
    Mesh,
    ModelExport,
    NodeState,
    Prompts,
    RunFolder,
    RunInfo,
    Tokenizer,
    Turns,
    run_log,
)

KEY = "OPENAI_API_KEY"
"""Environment variable whose value is sent as a bearer token."""

MAX_QUOTED = 300
"""Characters of a server's answer in an error message."""

REMEDIES = {
    400: "see max_tokens, and the server's maximum length (vLLM: --max-model-len)",
    401: f"set the environment variable {KEY}",
    403: f"set the environment variable {KEY}",
    404: "correct url and served_model; for a route in `reload`, or `version_path`, start vLLM with"
    " VLLM_SERVER_DEV_MODE=1",
}

PLAIN_SAMPLING: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    # A request names all ends, while the server's folder may name others.
    "ignore_eos": True,
}
"""Fields of a request for the model's own distribution, whatever the server's defaults are."""

TOKEN_PREFIX = "token_id:"
"""Start of a token's name under `return_tokens_as_token_ids`."""


class ServerFaultError(UserError):
    """A fault that may pass: no answer, a lost connection, or HTTP 429 or 5xx."""


@attrs.define
class Sampled:
    """
    Ids after a prompt: sampled ones up to an end token, and an environment's messages between them.

    `logps` are log-probabilities, None for an environment's ids. `is_ended` is False for a cut trajectory. `versions`,
    as long as `ids`, count the optimizer steps before the weights at a request's start. `routes` are numpy's files in
    base64, (tokens, layers, choices), by turn, if the server returns them: without the turn's last token.
    """

    ids: list[int] = attrs.field(factory=list)
    logps: list[float | None] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    routes: list[str] = attrs.field(factory=list)
    is_ended: bool = False


class ServedVersion(NamedTuple):
    """
    Weights in a server: the run's name, its name for the server since the start, and the weights' purpose and step.

    The server keeps it as a text, `run.life.purpose.step`, and a restarted server has another one.
    """

    run: str
    life: str
    purpose: str
    step: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


@attrs.frozen
class CompletionServer:
    """A server's address; every request has its own connection. Requests raise UserError with a remedy."""

    url: str
    timeout: float

    def find_served_model_name(self, wanted: str | None) -> str:
        """Return the name of the served model: `wanted`, or the only one. Raises UserError for any other."""
        answer = self.request("GET", "/v1/models")
        try:
            served = [str(entry["id"]) for entry in answer["data"]]
        except (KeyError, TypeError) as error:
            raise UserError(self._describe_fault("/v1/models", "the answer lists no models", "correct url")) from error
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted in served:
            return wanted
        names = ", ".join(served) or "none"
        asked = "no model is named" if wanted is None else f"there is no model {wanted!r}"
        raise UserError(
            self._describe_fault("/v1/models", f"{asked}, and the served ones are: {names}", "write served_model")
        )

    def read_version(self, path: str) -> ServedVersion | None:
        """Return the version of the server's weights; None if no run has sent them."""
        answer = self.request("GET", path)
        try:
            parts = str(answer["weight_version"]).split(".")
        except (KeyError, TypeError) as error:
            text, remedy = "the answer has no weight_version", 'correct version_path, or write version_path = ""'
            raise UserError(self._describe_fault(path, text, remedy)) from error
        if len(parts) != len(ServedVersion._fields) or not parts[-1].isdecimal():
            return None
        run, life, purpose, number = parts
        return ServedVersion(run, life, purpose, int(number))

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        end_ids: frozenset[int],
        count: int = 1,
    ) -> list[Sampled]:
        """Sample `count` completions for a prompt; one ends at any of `end_ids`, or has `max_tokens` tokens."""
        fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop_token_ids": sorted(end_ids)}
        choices = self._request_choices(model, prompt, fields, logprobs=1, count=count)
        return [self._read_completion(choice, max_tokens, end_ids) for choice in choices]

    def _read_completion(self, choice: Any, max_tokens: int, end_ids: frozenset[int]) -> Sampled:
        """Return a choice's ids up to an end, with log-probabilities. Raises UserError if they don't fit together."""
        ids, logps = self._read_ids(choice), self._read_logps(choice)
        if len(ids) != len(logps):  # log-probabilities are never empty
            raise self._make_unusable_answer_error(
                f"{len(ids)} token ids and {len(logps)} log-probabilities", "update the server"
            )
        count = next((index for index, token in enumerate(ids, 1) if token in end_ids), len(ids))
        if ids[count - 1] not in end_ids and count != max_tokens:
            ends = " or ".join(map(str, sorted(end_ids)))
            text = f"a completion ends after {count} of {max_tokens} tokens with the token {ids[-1]}, not with {ends}"
            raise self._make_unusable_answer_error(
                text, "correct the tokenizer's end token, or the server's stop settings"
            )
        return Sampled(
            ids[:count],
            [min(value, 0.0) for value in logps[:count]],
            is_ended=ids[count - 1] in end_ids,
            routes=[routes] if (routes := choice.get("routed_experts")) else [],
        )

    def check_scaled_logps(self, model: str, prompt: Sequence[int], temperature: float) -> None:
        """Raise UserError if log-probabilities ignore the temperature, which must differ from 1."""
        plain, scaled = (
            self._read_first_token_top_logps(
                self._request_choices(model, prompt, {"max_tokens": 1, "temperature": value, "seed": 0}, logprobs=2)[0]
            )
            for value in (1.0, temperature)
        )
        is_flat = plain[0] - plain[-1] < 1e-3  # scaled by any temperature, such a distribution is the same
        if not is_flat and abs(plain[0] - scaled[0]) < 1e-6:
            text = f"log-probabilities are those of temperature 1, and not of {temperature:g}"
            raise self._make_unusable_answer_error(
                text, "start vLLM with --logprobs-mode processed_logprobs, or write temperature = 1"
            )

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """
        Return the JSON value in an answer, None if there is none.

        Raises ServerFaultError without an answer or for HTTP 429 and 5xx, and UserError for any other answer.
        """
        parts = urlsplit(self.url)
        is_secure = parts.scheme == "https"
        connection_type = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = connection_type(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, parts.path.rstrip("/") + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            text, remedy = f"no answer within {self.timeout:g} s", "raise timeout, or read the server's log"
            raise ServerFaultError(self._describe_fault(path, text, remedy)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerFaultError(self._describe_fault(path, reason, "start the server, or correct url")) from error
        finally:
            connection.close()
        return self._parse_response(path, response.status, content)

    def _parse_response(self, path: str, status: int, content: bytes) -> Any:
        """Return the JSON value in an answer. Raises UserError for a status above 299."""
        if not 200 <= status < 300:
            quoted = " ".join(content.decode(errors="replace").split())[:MAX_QUOTED]
            text, remedy = f"HTTP {status}: {quoted or 'no text'}", REMEDIES.get(status, "read the server's log")
            kind = ServerFaultError if status >= 500 or status == 429 else UserError
            raise kind(self._describe_fault(path, text, remedy))
        try:
            return json.loads(content) if content.strip() else None
        except ValueError as error:
            text = f"the answer is not JSON: {content[:MAX_QUOTED]!r}"
            raise UserError(self._describe_fault(path, text, "correct url")) from error

    def _request_choices(
        self, model: str, prompt: Sequence[int], fields: Mapping[str, Any], logprobs: int, count: int = 1
    ) -> list[Any]:
        """Return the choices in the answer to a completion's request, by index."""
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {
            "model": model,
            "prompt": [*prompt],
            "n": count,
            "logprobs": logprobs,
            **PLAIN_SAMPLING,
            **ids,
            **fields,
        }
        answer = self.request("POST", "/v1/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        except (KeyError, TypeError, AttributeError) as error:
            raise self._make_unusable_answer_error("it has no choices", "correct url") from error
        if len(choices) != count:
            raise self._make_unusable_answer_error(f"it has {len(choices)} choices instead of {count}", "correct url")
        return choices

    def _read_ids(self, choice: Any) -> list[int]:
        """Return the sampled ids: texts can't be tokenized again without changes."""
        if choice.get("token_ids") is not None:
            return [int(number) for number in choice["token_ids"]]
        names = (choice.get("logprobs") or {}).get("tokens") or []
        if names and all(str(name).startswith(TOKEN_PREFIX) for name in names):
            return [int(name.removeprefix(TOKEN_PREFIX)) for name in names]
        raise self._make_unusable_answer_error(
            "it has no token ids", "use a server with return_token_ids, such as vLLM"
        )

    def _read_logps(self, choice: Any) -> list[float]:
        """Return the sampled ids' log-probabilities."""
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if not values or any(value is None or not math.isfinite(value) for value in values):
            text = "it has no finite log-probability for each token"
            raise self._make_unusable_answer_error(
                text, "allow logprobs in the server; with NaN, see the policy's loss"
            )
        return [float(value) for value in values]

    def _read_first_token_top_logps(self, choice: Any) -> list[float]:
        """Return the first token's largest log-probabilities, in descending order."""
        try:
            return sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._make_unusable_answer_error(
                "it has no top_logprobs", "allow logprobs = 2 in the server"
            ) from error

    def _make_unusable_answer_error(self, text: str, remedy: str) -> UserError:
        """Return the error for a completion's answer."""
        return UserError(self._describe_fault("/v1/completions", f"unusable answer: {text}", remedy))

    def make_version_fault(self, path: str, version: ServedVersion | None, wanted: ServedVersion) -> ServerFaultError:
        """Return the fault of a server with other weights than the run's."""
        text = f"the server has the weights {version or 'of its start'}, and not {wanted}"
        return ServerFaultError(self._describe_fault(path, text, "let no other run update this server"))

    def _describe_fault(self, path: str, text: str, remedy: str) -> str:
        """Return a message with the request's address."""
        return f"{self.url.rstrip('/')}{path}: {text}; {remedy}"


FOLDER, VERSION = "{folder}", "{version}"
"""Texts in a request's body for the exported folder's absolute path, and for the weights' version."""

TRAIN = "train"
"""Purpose of the rollouts for learning."""

FIRST_WAIT = 1.0
"""Seconds before the first retry."""

SEED_BITS = 53
"""Bits of a seed in JSON, whose numbers are float64 in some servers."""


def _find_url_fault(url: str) -> str | None:
    """Return the fault of a server's address, or None."""
    parts = urlsplit(url)
    is_valid = parts.scheme in ("http", "https") and parts.hostname
    return None if is_valid else "is not an address such as http://localhost:8000"


def _find_path_fault(path: str) -> str | None:
    """Return why a path is not a route, or None."""
    return None if path.startswith("/") else "does not begin with /"


@attrs.frozen(kw_only=True)
class ServerCall:
    """A POST request that is part of a weight update."""

    path: str = setting("route, such as /update_weights_from_disk", check=_find_path_fault)
    body: dict[str, Any] = setting(
        "JSON object; {folder} in a text is the exported folder's path, {version} the weights'", factory=dict
    )


def _list_vllm_reload_calls() -> list[ServerCall]:
    """Return vLLM's requests for a weight update."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
    version = ServerCall(path="/update_weight_version", body={"new_version": VERSION})
    return [ServerCall(path="/collective_rpc", body=reload), ServerCall(path="/reset_prefix_cache"), version]


class _RowToComplete(NamedTuple):
    """A row's prompt, its key and seed, and the ids to end its turns."""

    prompt: list[int]
    key: int
    seed: int
    end_ids: frozenset[int]

    def shares_request(self, other: "_RowToComplete") -> bool:
        """Return whether one request can have both rows as choices."""
        return (self.prompt, self.end_ids) == (other.prompt, other.end_ids)


@component
class ServerRollouts:
    """
    Sampler that asks a server with OpenAI's completions API, such as vLLM or SGLang, and updates its weights.

    An update exports the policy, without an average, as a Hugging Face folder, which the server must see at the same
    path, and sends the requests `reload`. A row's first turn is one request with token ids and its own seed, unless
    `rows_per_request` is above 1; whether the server's numbers depend on the rows beside it is the server's matter. The
    server's log-probabilities are the denominator of the loss's ratio, and `metrics.rollouts` reports their largest
    distance from the training pass as `sampler_difference`. Entropies are estimated by the sampled tokens: minus their
    log-probabilities.

    With `update_every` above 1, checkpoints contain the server's export, so a resumed run samples from the
    same weights as a run without interruption. One rank of each model replica sends requests.

    After a row's requests the run asks for the version of the server's weights: a restarted server has no version of
    this run. After such a fault, or any other, the run waits, sends the weights again, and samples again the
    rows without an answer before the fault. With a lag, requests are under way while the policy trains.
    """

    model: LanguageModel
    export: ModelExport
    tokenizer: Tokenizer
    job: RunInfo
    folder: RunFolder
    mesh: Mesh
    max_tokens: int = setting("maximum length of a completion in tokens", check=between(1, MAX_LENGTH))
    temperature: float = setting(
        "divisor of the logits, in sampling and in the policy's log-probabilities", default=1.0, check=above(0)
    )
    url: str = setting("the server's address, without /v1", default="http://localhost:8000", check=_find_url_fault)
    served_model: str | None = setting("the model's name in the server; default: the only one", default=None)
    update_every: int = setting(
        "steps between updates of the server's weights; 1 samples from the newest", default=1, check=at_least(1)
    )
    reload: list[ServerCall] = setting(
        "requests that load an exported folder, in order; default: vLLM's", factory=_list_vllm_reload_calls
    )
    version_path: str = setting(
        "route that returns the `weight_version`; empty: a restart between two requests is not noticed, and every "
        "rollout sends the weights again",
        default="/weight_info",
        check=lambda path: _find_path_fault(path) if path else None,
    )
    in_flight: bool = setting(
        "whether weights are updated while requests are under way, which then go on with the new ones", default=False
    )
    connections: int = setting("requests of a replica at a time", default=64, check=between(1, 1025))
    rows_per_request: int = setting(
        "completions per request; above 1 they share a seed, and depend on each other",
        default=1,
        check=between(1, 10_001),
    )
    timeout: float = setting("seconds to wait for an answer", default=300.0, check=above(0))
    retries: int = setting(
        "times to wait for a server after a fault, 1 s and then twice as long, up to 30 s each",
        default=8,
        check=between(0, 10_001),
        impact="safe",
    )
    _copy: Group = internal(None)
    _name: str = internal("")
    _run: str = internal("")
    _updated_step: int | None = internal(None)
    _served: ServedVersion = internal(ServedVersion("", "", "", 0))
    _update: threading.Lock = internal(factory=threading.Lock)  # while the weights are exchanged
    _running: list[Future[list[Sampled]]] = internal(factory=list)
    _is_closed: threading.Event = internal(factory=threading.Event)
    _has_checked_temperature: bool = internal(False)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report versions that no request sends, and updates in flight without requests under way."""
        sent = [call.get("body", {}) if isinstance(call, Mapping) else call.body for call in node.settings["reload"]]
        if node.settings["version_path"] and VERSION not in json.dumps(sent):
            text = f"no request sends the weights' version, and {node.settings['version_path']} is asked for it"
            yield node.problem("reload", text, 'write weight_version = "{version}" in a body, or version_path = ""')
        if node.settings["in_flight"] and not any(other.settings.get("lag") for other in node.nodes.values()):
            text = "no request is under way while the weights are updated"
            yield node.problem("in_flight", text, "write lag = 1 in the rollout, or leave in_flight out")

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def close(self) -> None:
        """Remove the exported weights, and send no more requests."""
        self._is_closed.set()
        if (self._served.purpose or self._updated_step is not None) and self.mesh.world.rank == 0:
            with suppress(OSError):
                remove_folder_atomically(self._export_folder)

    def update_weights(self, purpose: str, step: int) -> None:
        """
        Export the weights and let the server load them, unless `purpose` is "train" and its last update is recent.

        Training continues with its own export after an evaluation. Requests under way are awaited before, if they are
        for another purpose, or not `in_flight`. Raises UserError on all ranks. A collective.
        """
        world = self.mesh.world
        if not self._name:
            self._name, self._run = run_on_rank0(
                world, lambda: (self._server.find_served_model_name(self.served_model), secrets.token_hex(4))
            )
        last, target = self._updated_step, self._export_folder / purpose
        is_due = purpose != TRAIN or last is None or step - last >= self.update_every
        is_other = self._served.purpose != purpose
        if not is_due and not is_other and self.version_path:
            return
        if is_other or not self.in_flight:
            run_and_gather_on_all_ranks(world, lambda: wait(self._running))
        with self._update:
            if is_due:
                run_on_rank0(world, lambda: self._remove_export_and_make_parent(target))
                self.export.gather_and_export_to(target)
                self._updated_step = step if purpose == TRAIN else last
            version = (self._updated_step or 1) if purpose == TRAIN else step
            sent = run_on_rank0(world, lambda: self._send_reload_with_retries(purpose, version))
            self._served = ServedVersion._make(sent)

    def state_dict(self) -> NodeState:
        """
        Return the step of the server's weights, and the files of their export; empty if every rollout updates them.

        The tensors map the files: a checkpoint reads them, and nothing is copied before.
        """
        if self.update_every == 1 or self._updated_step is None:
            return {}
        files = {path.name: _memory_map_file(path) for path in sorted((self._export_folder / TRAIN).iterdir())}
        return {"step": self._updated_step, "files": files}

    def load_state_dict(self, state: NodeState) -> None:
        """Write the export again, for the next rollout. Raises KeyError for another node's state."""
        if state and state.keys() != {"step", "files"}:
            raise KeyError(f"the state of a server's rollouts has step and files, and this one has {sorted(state)}")
        self._updated_step = int(state["step"]) if state else None
        self._served = ServedVersion("", "", "", 0)
        target = self._export_folder / TRAIN
        if state and self.mesh.world.rank == 0:
            self._remove_export_and_make_parent(target)
            target.mkdir()
            for name, content in state["files"].items():
                (target / name).write_bytes(content.numpy())

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        """Complete the prompts. Raises UserError on all ranks of the replica if the server fails."""
        return self.start_sampling(prompts, purpose, step)()

    def start_sampling(self, prompts: Sequence[Prompts], purpose: str, step: int) -> Callable[[], list[Completions]]:
        if self._served.purpose != purpose:
            self.update_weights(purpose, step)
        seed = derive_seed(self.job.seed, "rollouts", purpose, step)
        rows = [
            _RowToComplete(tokens[:length].tolist(), key, derive_seed(seed, key) % 2**SEED_BITS, end_ids)
            for part in prompts
            for tokens, length, key, end_ids in zip(
                part.tokens, part.lengths, part.keys.tolist(), part.end_ids_by_row(self.tokenizer), strict=True
            )
        ]
        running: Future[list[Sampled]] = Future()
        if self._copy.rank == 0:
            pool = ThreadPoolExecutor(1, "rollouts")
            running = pool.submit(self._sample_rows, rows, prompts[0].turns if prompts else None)
            pool.shutdown(wait=False)
            self._running = [*(other for other in self._running if not other.done()), running]

        def wait_for_completions() -> list[Completions]:
            """Return the rows by microbatch. A collective."""
            sampled = run_on_rank0(self._copy, lambda: [attrs.asdict(row) for row in running.result()])
            rest = iter(sampled)
            return [self._make_completions(part, [Sampled(**next(rest)) for _ in part.keys]) for part in prompts]

        return wait_for_completions

    @property
    def _server(self) -> CompletionServer:
        return CompletionServer(self.url, self.timeout)

    @property
    def _export_folder(self) -> Path:
        return self.folder.folder.absolute() / "policy"

    def _remove_export_and_make_parent(self, target: Path) -> None:
        """Remove an earlier export, and make the folder around it."""
        remove_folder_atomically(target)
        target.parent.mkdir(exist_ok=True)

    def _send_reload(self, purpose: str, step: int) -> ServedVersion:
        """Let the server load an exported folder. Raises ServerFaultError if it then has another version."""
        now = self._server.read_version(self.version_path) if self.version_path else None
        life = now.life if now is not None and now.run == self._run else secrets.token_hex(4)
        version = ServedVersion(self._run, life, purpose, step)
        texts = {FOLDER: str(self._export_folder / purpose), VERSION: str(version)}
        for call in self.reload:
            self._server.request("POST", call.path, _fill_in_texts(call.body, texts) or None)
        self._check_version_since(version)
        return version

    def _send_reload_with_retries(
        self, purpose: str, step: int, fault: ServerFaultError | None = None, waited: int = 0
    ) -> ServedVersion:
        """Let the server load a folder, after waiting for it to pass a fault. Raises the last fault if none is left."""
        while True:
            if fault is not None:
                if waited >= self.retries or self._is_closed.is_set():
                    raise fault
                run_log.warning("%s; waiting for the server", fault)
                self._is_closed.wait(min(FIRST_WAIT * 2**waited, 30.0))
                waited += 1
            try:
                return self._send_reload(purpose, step)
            except ServerFaultError as error:
                fault = error

    def _check_version_since(self, first: ServedVersion) -> None:
        """Raise ServerFaultError if the server has been restarted since a request, or has another run's weights."""
        now = self._server.read_version(self.version_path) if self.version_path else first
        if now is None or now[:3] != first[:3] or now.step < first.step:
            raise self._server.make_version_fault(self.version_path, now, first)

    def _sample_rows(self, rows: Sequence[_RowToComplete], turns: Turns | None) -> list[Sampled]:
        """Return a trajectory by row; after a server's fault, the missing rows are sampled again."""
        if rows and self.temperature != 1 and not self._has_checked_temperature:
            self._server.check_scaled_logps(self._name, rows[0].prompt, self.temperature)
            self._has_checked_temperature = True
        done: dict[int, Sampled] = {}
        fault_count = 0
        while (fault := self._fill_missing_rows(rows, turns, done, fault_count > 0)) is not None:
            with self._update:
                self._served = self._send_reload_with_retries(
                    self._served.purpose, self._served.step, fault, fault_count
                )
            fault_count += 1
        self._check_token_ids(done.values())
        return [done[row] for row in range(len(rows))]

    def _check_token_ids(self, sampled: Iterable[Sampled]) -> None:
        """Raise UserError for a sampled token that the policy does not have."""
        largest = max((max(row.ids) for row in sampled), default=0)
        if largest >= self.model.vocab_size:
            text = f"{self.url}: the server sampled the token {largest}, and the policy has {self.model.vocab_size}"
            raise UserError(f"{text}; let the server start from the same model")

    def _fill_missing_rows(
        self, rows: Sequence[_RowToComplete], turns: Turns | None, done: dict[int, Sampled], is_again: bool
    ) -> ServerFaultError | None:
        """
        Add the missing rows to `done`; return the server's first fault, if there is one.

        A row is dropped if it ends after a fault was noticed: a restarted server answers with other weights.
        """
        missing = [row for row in range(len(rows)) if row not in done]
        groups: list[list[int]] = []
        for row in missing:
            if groups and len(groups[-1]) < self.rows_per_request and rows[row].shares_request(rows[groups[-1][0]]):
                groups[-1].append(row)
            else:
                groups.append([row])
        if turns is not None and is_again:
            turns.restart_rows([rows[row].key for row in missing])
        has_failed = threading.Event()

        def sample_group(group: list[int]) -> None:
            """Sample rows with one prompt."""
            if self._is_closed.is_set():
                raise UserError(f"{self.url}: the run has ended")
            try:
                sampled = self._sample_trajectories([rows[row] for row in group], turns)
            except ServerFaultError:
                has_failed.set()
                raise
            if not has_failed.is_set():
                done.update(zip(group, sampled, strict=True))

        with ThreadPoolExecutor(min(self.connections, len(groups)) or 1, "rollouts") as pool:
            futures = [pool.submit(sample_group, group) for group in groups]
            try:
                for future in as_completed(futures):
                    future.result()
            except ServerFaultError as fault:
                pool.shutdown(wait=True, cancel_futures=True)
                return fault
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return None

    def _sample_trajectories(self, rows: Sequence[_RowToComplete], turns: Turns | None) -> list[Sampled]:
        """Sample rows with one prompt: their first turns in one request, and every later turn in its own."""
        limits: dict[str, Any] = {"temperature": self.temperature, "end_ids": rows[0].end_ids}
        server, name, prompt, first = self._server, self._name, rows[0].prompt, self._served
        firsts = server.complete(name, prompt, max_tokens=self.max_tokens, seed=rows[0].seed, count=len(rows), **limits)
        for row, trajectory in zip(rows, firsts, strict=True):
            turn = trajectory
            trajectory.versions = [first.step - 1] * len(turn.ids)
            while turns is not None and trajectory.is_ended:
                (message,) = turns.continue_rows([row.key], [turn.ids])
                if message is None:
                    break
                room = self.max_tokens - len(trajectory.ids) - len(message)
                if room <= 0:
                    trajectory.is_ended = False
                    break
                trajectory.ids += message
                trajectory.logps += [None] * len(message)
                seed = derive_seed(row.seed, len(trajectory.ids)) % 2**SEED_BITS
                version = self._served.step - 1
                (turn,) = server.complete(name, prompt + trajectory.ids, max_tokens=room, seed=seed, **limits)
                trajectory.ids += turn.ids
                trajectory.logps += turn.logps
                trajectory.routes += turn.routes
                trajectory.versions += [version] * (len(message) + len(turn.ids))
                trajectory.is_ended = turn.is_ended
        self._check_version_since(first)
        return firsts

    def _make_completions(self, prompts: Prompts, sampled: Sequence[Sampled]) -> Completions:
        """Return a microbatch's rows, padded with the end token to the prompts' length and `max_tokens`."""
        count, prompt_length = prompts.tokens.shape
        length, end = prompt_length + self.max_tokens, self.tokenizer.eos_id
        tokens, logps = torch.full((count, length), end), torch.zeros(count, length)
        versions = torch.zeros(count, length, dtype=torch.int32)
        is_sampled = torch.zeros(count, length, dtype=torch.bool)
        for row, (start, completion) in enumerate(zip(prompts.lengths.tolist(), sampled, strict=True)):
            last = start + len(completion.ids)
            tokens[row, :start] = prompts.tokens[row, :start]
            tokens[row, start:last] = torch.tensor(completion.ids)
            logps[row, start - 1 : last - 1] = torch.tensor([value or 0.0 for value in completion.logps])
            versions[row, start:last] = torch.tensor(completion.versions)
            is_sampled[row, start:last] = torch.tensor([value is not None for value in completion.logps])
        ends = prompts.lengths + torch.tensor([len(completion.ids) for completion in sampled])
        is_ended = torch.tensor([completion.is_ended for completion in sampled])
        return Completions(
            tokens=tokens,
            starts=prompts.lengths,
            ends=ends,
            logps=logps,
            entropies=-logps,
            is_ended=is_ended,
            is_sampled=is_sampled,
            versions=versions,
            routes=_decode_routes([completion.routes for completion in sampled], length),
        )


def _decode_routes(turns_by_row: Sequence[Sequence[str]], length: int) -> Tensor | None:
    """
    Return the experts of the rows' tokens, counted from 1: int32 (rows, length, layers, choices); None without any.

    A turn's answer repeats earlier tokens, whose first answer counts. Raises UserError for other content.
    """
    if not any(turns_by_row):
        return None
    try:
        rows = [[numpy.load(io.BytesIO(base64.b64decode(text))) for text in turns] for turns in turns_by_row]
        shape = next(turns[0].shape[1:] for turns in rows if turns)
        routes = torch.zeros(len(rows), length, *shape, dtype=torch.int32)
        for row, turns in zip(routes, rows, strict=True):
            known = 0
            for turn in turns:
                row[known : len(turn)] = torch.from_numpy(turn[known:].astype(numpy.int32)) + 1
                known = len(turn)
    except (ValueError, RuntimeError, EOFError) as error:
        text = f"the server's routed_experts are not an array (tokens, layers, choices) in base64: {error}"
        raise UserError(f"{text}; update the server, or start it without --enable-return-routed-experts") from error
    return routes


def _memory_map_file(path: Path) -> Tensor:
    """Return a file's bytes, uint8 (size,), which stay readable after the file is removed."""
    size = path.stat().st_size
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _fill_in_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a JSON value in which texts have values for {folder} and {version}."""
    if isinstance(value, Mapping):
        return {key: _fill_in_texts(entry, texts) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_fill_in_texts(entry, texts) for entry in value]
    for name, text in texts.items() if isinstance(value, str) else ():
        value = value.replace(name, text)
    return value
