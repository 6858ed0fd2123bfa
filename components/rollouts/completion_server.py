"""Client of a server with OpenAI's completions API, such as vLLM or SGLang: requests, answers, and their faults."""

import http.client
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import attrs

from drawloom.graph import UserError

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


@attrs.frozen
class Sampled:
    """Sampled ids, up to the end token, and their log-probabilities."""

    ids: list[int]
    logps: list[float]


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
    ) -> Sampled:
        """Sample one completion for a prompt of ids; it ends at one of `end_ids`, or has `max_tokens` tokens."""
        fields = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": sorted(end_ids),
        }
        choice = self._request_choice(model, prompt, fields, logprobs=1)
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
        return Sampled(ids[:count], [min(value, 0.0) for value in logps[:count]])

    def check_scaled_logps(self, model: str, prompt: Sequence[int], temperature: float) -> None:
        """Raise UserError if log-probabilities ignore the temperature, which must differ from 1."""
        plain, scaled = (
            self._read_first_token_top_logps(
                self._request_choice(model, prompt, {"max_tokens": 1, "temperature": value, "seed": 0}, logprobs=2)
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
        """Return the JSON value in an answer, None if there is none. Raises UserError for any other answer."""
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
            raise UserError(self._describe_fault(path, text, remedy)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UserError(self._describe_fault(path, reason, "start the server, or correct url")) from error
        finally:
            connection.close()
        return self._parse_response(path, response.status, content)

    def _parse_response(self, path: str, status: int, content: bytes) -> Any:
        """Return the JSON value in an answer. Raises UserError for a status above 299."""
        if not 200 <= status < 300:
            quoted = " ".join(content.decode(errors="replace").split())[:MAX_QUOTED]
            text, remedy = f"HTTP {status}: {quoted or 'no text'}", REMEDIES.get(status, "read the server's log")
            raise UserError(self._describe_fault(path, text, remedy))
        try:
            return json.loads(content) if content.strip() else None
        except ValueError as error:
            text = f"the answer is not JSON: {content[:MAX_QUOTED]!r}"
            raise UserError(self._describe_fault(path, text, "correct url")) from error

    def _request_choice(self, model: str, prompt: Sequence[int], fields: Mapping[str, Any], logprobs: int) -> Any:
        """Return the only choice in the answer to a completion's request."""
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": [*prompt], "n": 1, "logprobs": logprobs, **PLAIN_SAMPLING, **ids, **fields}
        answer = self.request("POST", "/v1/completions", body)
        try:
            (choice,) = answer["choices"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._make_unusable_answer_error("it has no single choice", "correct url") from error
        return choice

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
