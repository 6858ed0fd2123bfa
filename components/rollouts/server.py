"""Completions sampled by a separate inference server, whose weights follow the policy."""

import http.client
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import attrs
import torch
from torch import Tensor

from drawloom import UserError, above, at_least, between, component, internal, setting
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.rng import derive_seed
from drawloom.components.storage.durable_files import remove_folder_atomically
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
)

KEY = "OPENAI_API_KEY"
"""Environment variable whose value is sent as a bearer token."""

MAX_QUOTED = 300
"""Characters of a server's answer in an error message."""

REMEDIES = {
    400: "see max_tokens, and the server's maximum length (vLLM: --max-model-len)",
    401: f"set the environment variable {KEY}",
    403: f"set the environment variable {KEY}",
    404: "correct url and served_model; for a route in `reload`, start vLLM with VLLM_SERVER_DEV_MODE=1",
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

    `logps` are log-probabilities, None for an environment's ids. `is_ended` is False for a cut trajectory.
    """

    ids: list[int] = attrs.field(factory=list)
    logps: list[float | None] = attrs.field(factory=list)
    is_ended: bool = False


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
        return Sampled(ids[:count], [min(value, 0.0) for value in logps[:count]], ids[count - 1] in end_ids)

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

    def _describe_fault(self, path: str, text: str, remedy: str) -> str:
        """Return a message with the request's address."""
        return f"{self.url.rstrip('/')}{path}: {text}; {remedy}"


log = logging.getLogger("drawloom.run")

FOLDER = "{folder}"
"""Text in a request's body that stands for the exported folder's absolute path."""

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
    body: dict[str, Any] = setting("JSON object; {folder} in a text is the exported folder's path", factory=dict)


def _list_vllm_reload_calls() -> list[ServerCall]:
    """Return vLLM's requests for a weight update."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
    return [ServerCall(path="/collective_rpc", body=reload), ServerCall(path="/reset_prefix_cache")]


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

    After a server's fault the run waits, sends the weights again, since a restarted server has other ones, and samples
    again the rows without an answer before the fault. A restart while no request is under way is not noticed before the
    next update.
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
    _name: str | None = internal(None)
    _updated_step: int | None = internal(None)
    _served_purpose: str | None = internal(None)
    _has_checked_temperature: bool = internal(False)

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def close(self) -> None:
        """Remove the exported weights."""
        if (self._served_purpose or self._updated_step is not None) and self.mesh.world.rank == 0:
            with suppress(OSError):
                remove_folder_atomically(self._export_folder)

    def update_weights(self, purpose: str, step: int) -> None:
        """
        Export the weights and let the server load them, unless `purpose` is "train" and its last update is recent.

        Training continues with its own export after an evaluation. Raises UserError on all ranks. A collective.
        """
        world = self.mesh.world
        if self._name is None:
            self._name = str(run_on_rank0(world, lambda: self._server.find_served_model_name(self.served_model)))
        last, target = self._updated_step, self._export_folder / purpose
        is_due = purpose != TRAIN or last is None or step - last >= self.update_every
        if is_due:
            run_on_rank0(world, lambda: self._remove_export_and_make_parent(target))
            self.export.gather_and_export_to(target)
        if is_due or self._served_purpose != purpose:
            run_on_rank0(world, lambda: self._send_reload_with_retries(target))
        self._served_purpose = purpose
        if is_due and purpose == TRAIN:
            self._updated_step = step

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
        self._updated_step, self._served_purpose = (int(state["step"]), None) if state else (None, None)
        target = self._export_folder / TRAIN
        if state and self.mesh.world.rank == 0:
            self._remove_export_and_make_parent(target)
            target.mkdir()
            for name, content in state["files"].items():
                (target / name).write_bytes(content.numpy())

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        """Complete the prompts. Raises UserError on all ranks of the replica if the server fails."""
        if self._served_purpose != purpose:
            self.update_weights(purpose, step)
        seed = derive_seed(self.job.seed, "rollouts", purpose, step)
        rows = [
            _RowToComplete(tokens[:length].tolist(), key, derive_seed(seed, key) % 2**SEED_BITS, end_ids)
            for part in prompts
            for tokens, length, key, end_ids in zip(
                part.tokens, part.lengths, part.keys.tolist(), part.end_ids_by_row(self.tokenizer), strict=True
            )
        ]
        turns = prompts[0].turns if prompts else None
        sampled = iter(run_on_rank0(self._copy, lambda: [attrs.asdict(row) for row in self._sample_rows(rows, turns)]))
        return [self._make_completions(part, [Sampled(**next(sampled)) for _ in part.keys]) for part in prompts]

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

    def _send_reload(self, target: Path) -> None:
        """Let the server load an exported folder."""
        for call in self.reload:
            self._server.request("POST", call.path, _fill_in_folder(call.body, str(target)) or None)

    def _send_reload_with_retries(self, target: Path, fault: ServerFaultError | None = None, waited: int = 0) -> None:
        """Let the server load a folder, after waiting for it to pass a fault. Raises the last fault if none is left."""
        while True:
            if fault is not None:
                if waited >= self.retries:
                    raise fault
                log.warning("%s; waiting for the server", fault)
                time.sleep(min(FIRST_WAIT * 2**waited, 30.0))
                waited += 1
            try:
                return self._send_reload(target)
            except ServerFaultError as error:
                fault = error

    def _sample_rows(self, rows: Sequence[_RowToComplete], turns: Turns | None) -> list[Sampled]:
        """Return a trajectory by row; after a server's fault, the missing rows are sampled again."""
        if rows and self.temperature != 1 and not self._has_checked_temperature:
            self._server.check_scaled_logps(str(self._name), rows[0].prompt, self.temperature)
            self._has_checked_temperature = True
        done: dict[int, Sampled] = {}
        waited = 0
        while (fault := self._sample_missing_rows(rows, turns, done, is_again=waited > 0)) is not None:
            self._send_reload_with_retries(self._export_folder / str(self._served_purpose), fault, waited)
            waited += 1
        largest = max((max(row.ids) for row in done.values()), default=0)
        if largest >= self.model.vocab_size:
            text = f"{self.url}: the server sampled the token {largest}, and the policy has {self.model.vocab_size}"
            raise UserError(f"{text}; let the server start from the same model")
        return [done[row] for row in range(len(rows))]

    def _sample_missing_rows(
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
        server, name, prompt = self._server, str(self._name), rows[0].prompt
        firsts = server.complete(name, prompt, max_tokens=self.max_tokens, seed=rows[0].seed, count=len(rows), **limits)
        for row, trajectory in zip(rows, firsts, strict=True):
            turn = trajectory
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
                (turn,) = server.complete(name, prompt + trajectory.ids, max_tokens=room, seed=seed, **limits)
                trajectory.ids += turn.ids
                trajectory.logps += turn.logps
                trajectory.is_ended = turn.is_ended
        return firsts

    def _make_completions(self, prompts: Prompts, sampled: Sequence[Sampled]) -> Completions:
        """Return a microbatch's rows, padded with the end token to the prompts' length and `max_tokens`."""
        count, prompt_length = prompts.tokens.shape
        length, end = prompt_length + self.max_tokens, self.tokenizer.eos_id
        tokens, logps = torch.full((count, length), end), torch.zeros(count, length)
        is_sampled = torch.zeros(count, length, dtype=torch.bool)
        for row, (start, completion) in enumerate(zip(prompts.lengths.tolist(), sampled, strict=True)):
            last = start + len(completion.ids)
            tokens[row, :start] = prompts.tokens[row, :start]
            tokens[row, start:last] = torch.tensor(completion.ids)
            logps[row, start - 1 : last - 1] = torch.tensor([value or 0.0 for value in completion.logps])
            is_sampled[row, start:last] = torch.tensor([value is not None for value in completion.logps])
        ends = prompts.lengths + torch.tensor([len(completion.ids) for completion in sampled])
        is_ended = torch.tensor([completion.is_ended for completion in sampled])
        versions = torch.full((count,), (self._updated_step or 1) - 1)
        return Completions(
            tokens, prompts.lengths, ends, logps, -logps, is_ended, is_sampled=is_sampled, versions=versions
        )


def _memory_map_file(path: Path) -> Tensor:
    """Return a file's bytes, uint8 (size,), which stay readable after the file is removed."""
    size = path.stat().st_size
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _fill_in_folder(value: Any, folder: str) -> Any:
    """Return a JSON value in which texts have the folder's path for {folder}."""
    if isinstance(value, Mapping):
        return {key: _fill_in_folder(entry, folder) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_fill_in_folder(entry, folder) for entry in value]
    return value.replace(FOLDER, folder) if isinstance(value, str) else value
