"""A client for any server with an OpenAI-compatible chat API: vLLM, SGLang, hosted ones.

Every prompt ends in one of three ways: an answer, a rejection with its reason, or an error that
ends the run because no later prompt would fare better.
"""

import asyncio
import os
import random
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

import httpx

from draftworks.config import EndpointConfig, GenerateConfig
from draftworks.errors import DraftworksError
from draftworks.records.prompts import Prompt
from draftworks.records.samples import Rejected
from draftworks.workspace import digest

BASE_DELAY = 1.0
"""Seconds before the second try; doubled for each further one."""
LONGEST_DELAY = 60.0
PROBE_SECONDS = 30.0
REPEATED = 8
"""An answer longer than this that is one character over and over comes from a broken server."""
PASSING = {408, 409, 425, 429}
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
SURROGATE = re.compile("[\ud800-\udfff]")
REMEDIES = {
    401: "Check the key in the variable that `generate.endpoint.api_key_env` names.",
    403: "The key in `generate.endpoint.api_key_env` may not use this model.",
    404: "Check `generate.endpoint.base_url` (up to and including /v1) and the model's name.",
}


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt.

    text: opening mark, reasoning, closing mark and content, whitespace as received.
    finish_reason: "stop" or "length".
    prompt_ids, token_ids: exact ids of prompt and completion, if the server gave them (vLLM).
    completion_tokens: the server's own count.
    """

    text: str
    finish_reason: str
    prompt_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    completion_tokens: int | None


class TransientError(Exception):
    """A fault that may be gone at the next try. `retry_after`: seconds the server asked for."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnusableError(TransientError):
    """A success that holds no answer. The message is the reason of the rejection if it stays."""


async def answers(
    prompts: Iterable[Prompt], config: GenerateConfig, model: str
) -> AsyncGenerator[tuple[Prompt, Answer | Rejected], None]:
    """Every prompt once, in order of completion; at most `in_flight` prompts are open.

    Leave early through `contextlib.aclosing`, which cancels what is open. Raises DraftworksError
    when the server refuses a prompt or stays out of reach.
    """
    waiting = iter(prompts)
    async with aclosing(_Server(config, model)) as server:

        async def one(prompt: Prompt) -> tuple[Prompt, Answer | Rejected]:
            return prompt, await server.answer(prompt)

        tasks: set[asyncio.Task[tuple[Prompt, Answer | Rejected]]] = set()
        try:
            while True:
                for prompt in islice(waiting, config.endpoint.in_flight - len(tasks)):
                    tasks.add(asyncio.create_task(one(prompt)))
                if not tasks:
                    return
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                # Faults last: what finished in the same moment is not lost with them.
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def probe(config: GenerateConfig, model: str) -> None:
    """Raises DraftworksError unless the server answers, takes the key and lists the model."""
    async with aclosing(_Server(config, model)) as server:
        names = await server.models()
    if server.model not in names:
        nearest = ", ".join(get_close_matches(server.model, names, n=10, cutoff=0))
        raise DraftworksError(
            f"{server.name}: no model {server.model!r} among the {len(names)} there"
            f"{f', nearest first: {nearest}' if names else ''}. "
            "Set `generate.endpoint.model` to the name the server uses."
        )


def parse(prompt: Prompt, payload: Any, config: GenerateConfig) -> Answer | Rejected:
    """The answer in the JSON of a success. Raises UnusableError when asking again may help."""
    match payload:
        case {"choices": [{"message": dict(message)} as choice, *_]}:
            finish = choice.get("finish_reason")
        case {"error": {"code": int(code)}}:  # a gateway's success around a provider's failure
            raise UnusableError(f"no answer: error {code}")
        case _:
            raise UnusableError("no answer: no choices")
    if finish in (None, "error"):  # the provider broke off in the middle
        raise UnusableError(f"no answer: finish_reason {finish or 'null'}")
    if finish not in ("stop", "length"):
        return Rejected(prompt.id, str(finish)[:40])
    content = message.get("content")
    reasonings = (message.get(name) for name in ("reasoning_content", "reasoning"))
    reasoning = next((text for text in reasonings if text and isinstance(text, str)), "")
    if content is None and reasoning:
        content = ""  # all tokens went into thinking
    if not isinstance(content, str):
        raise UnusableError("no answer: null content")
    if not (reasoning + content).strip():
        return Rejected(prompt.id, "empty")
    if _repeats(reasoning) or _repeats(content):
        return Rejected(prompt.id, "repetition")
    marked = config.reasoning_open + reasoning + config.reasoning_close if reasoning else ""
    text = marked + content
    if SURROGATE.search(text):  # half a character: no UTF-8, so no Parquet
        return Rejected(prompt.id, "invalid text")
    prompt_ids, token_ids = _ids(payload.get("prompt_token_ids")), _ids(choice.get("token_ids"))
    usage = payload.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(text, finish, prompt_ids, token_ids, counted)


def pause(attempt: int, retry_after: float) -> float:
    """Seconds to wait after the `attempt`-th try (from 1), scattered so that no herd returns."""
    backoff: float = BASE_DELAY * 2 ** (attempt - 1) * random.uniform(0.5, 1)
    return min(max(backoff, retry_after), LONGEST_DELAY)


class _Server:
    """The HTTP side: one address, one model, one key. The key is in no message it raises."""

    def __init__(self, config: GenerateConfig, model: str) -> None:
        endpoint = config.endpoint
        self.config = config
        self.model = endpoint.model or model
        self.name = f"endpoint {endpoint.base_url}"
        self.key = _key(endpoint)
        self.ask_ids = True
        url = _address(endpoint)
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=None,  # httpx would count each read; `_send` bounds the whole answer
            limits=httpx.Limits(max_connections=endpoint.in_flight),
            trust_env=url.host not in LOOPBACK,  # a proxy does not lead to this machine
        )

    async def aclose(self) -> None:
        await self.client.aclose()

    async def answer(self, prompt: Prompt) -> Answer | Rejected:
        """Try until answered. Raises DraftworksError when the server cannot or will not."""
        attempts = self.config.endpoint.attempts
        for attempt in range(1, attempts + 1):
            try:
                return parse(prompt, await self._complete(prompt), self.config)
            except TransientError as fault:
                last = fault
            if attempt < attempts:
                await asyncio.sleep(pause(attempt, last.retry_after))
        if isinstance(last, UnusableError):
            return Rejected(prompt.id, str(last))
        raise DraftworksError(
            f"{self.name}: no answer to {prompt.origin} in {attempts} tries, at last {last}. "
            "What is committed stays; start again when the server answers."
        )

    async def models(self) -> list[str]:
        """What the server has. One try: raises DraftworksError when it does not answer."""
        try:
            response = await self._send("GET", "/models", None, PROBE_SECONDS)
            payload = self._payload(response, "the list of models")
        except TransientError as fault:
            raise DraftworksError(
                f"{self.name} cannot be used: {fault}. Start the server, or correct "
                "`generate.endpoint.base_url`."
            ) from None
        rows = payload.get("data") if isinstance(payload, dict) else None
        return [str(row["id"]) for row in rows or () if isinstance(row, dict) and "id" in row]

    async def _complete(self, prompt: Prompt) -> Any:
        """One request. A server that refuses the question for ids is not asked for them again."""
        config, asked = self.config, self.ask_ids
        body = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            # One seed for all would give every prompt the same random numbers.
            "seed": int(digest([config.seed, prompt.id])[:7], 16),
            **({"return_token_ids": True} if asked else {}),
            **config.endpoint.extra_body,
        }
        seconds = config.endpoint.timeout_seconds
        response = await self._send("POST", "/chat/completions", body, seconds)
        if asked and response.status_code in (400, 422) and "return_token_ids" in response.text:
            self.ask_ids = False
            return await self._complete(prompt)
        return self._payload(response, prompt.origin)

    async def _send(self, method: str, path: str, body: Any, seconds: float) -> httpx.Response:
        try:
            async with asyncio.timeout(seconds):
                return await self.client.request(method, path, json=body)
        except TimeoutError:
            raise TransientError(f"nothing within {seconds:g} s") from None
        except httpx.RequestError as error:
            raise TransientError(self._clean(f"{type(error).__name__}: {error}")) from None

    def _payload(self, response: httpx.Response, subject: str) -> Any:
        """The JSON of a success. Raises TransientError, or DraftworksError if it will not pass."""
        status = response.status_code
        if not response.is_success:
            said = f"{status}: {self._clean(response.text)}"
            if status in PASSING or status >= 500:
                raise TransientError(said, _seconds(response.headers.get("Retry-After", "")))
            remedy = REMEDIES.get(status, "The request itself is refused: trying again is no use.")
            raise DraftworksError(f"{self.name} refused {subject} with {said}. {remedy}")
        try:
            return response.json()
        except ValueError:
            raise UnusableError("no answer: not JSON") from None

    def _clean(self, text: str) -> str:
        # Servers like to quote the key that they refuse.
        shown = text.replace(self.key, "[key]") if self.key else text
        return " ".join(shown.split())[:200]


def _key(endpoint: EndpointConfig) -> str:
    name = endpoint.api_key_env
    key = os.environ.get(name, "").strip() if name else ""
    if name and not (key and key.isascii() and key.isprintable()):
        raise DraftworksError(
            f"endpoint {endpoint.base_url}: the environment variable {name} "
            f"{'holds no usable key' if key else 'is not set'}. Export the key there, for the "
            "process that does the work, or empty `generate.endpoint.api_key_env`."
        )
    return key


def _address(endpoint: EndpointConfig) -> httpx.URL:
    try:
        url = httpx.URL(endpoint.base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise DraftworksError(
            "`generate.endpoint.base_url` must look like http://127.0.0.1:8000/v1, without user "
            "or password (a key goes into the variable that `api_key_env` names)."
        )
    return url


def _seconds(retry_after: str) -> float:
    """Retry-After in seconds; 0 for a date or nonsense."""
    return float(retry_after) if re.fullmatch(r"\d+(\.\d+)?", retry_after.strip()) else 0.0


def _repeats(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > REPEATED and len(set(stripped)) == 1


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return tuple(value)
    return None
