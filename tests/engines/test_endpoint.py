"""The endpoint client against a real HTTP server on loopback."""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftworks.config import EndpointConfig, GenerateConfig
from draftworks.engines import endpoint
from draftworks.engines.endpoint import Answer, UnusableError, answers, parse, pause, probe
from draftworks.errors import DraftworksError
from draftworks.records.prompts import Prompt
from draftworks.records.samples import Rejected

KEY = "sk-very-secret-0123456789"
KEY_VARIABLE = "DRAFTWORKS_TEST_KEY"
PATIENCE = 20.0
MODEL = "org/target"


class Call:
    """One request as the server saw it, with the ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.time = time.monotonic()
        self.path = handler.path
        self.authorization = handler.headers.get("Authorization")
        length = int(handler.headers.get("Content-Length", 0))
        self.body: dict[str, Any] = json.loads(handler.rfile.read(length) or b"{}")

    @property
    def prompt(self) -> str:
        return str(self.body["messages"][-1]["content"])

    def reply(self, payload: Any, status: int = 200, **headers: str) -> None:
        data = payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()
        self._handler.wfile.write(data)

    def cut(self) -> None:
        """Promise a body and hang up in the middle of it."""
        self._handler.send_response(200)
        self._handler.send_header("Content-Length", "1000")
        self._handler.end_headers()
        self._handler.wfile.write(b'{"choices": [{"mess')
        self._handler.close_connection = True


class Server(ThreadingHTTPServer):
    """Answers every request by `behave`, and remembers all of them."""

    request_queue_size = 64
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[Call] = []
        self.faults: list[BaseException | None] = []
        self.behave: Callable[[Call], None] = lambda call: call.reply(said(call.prompt))
        self.released = threading.Event()
        """Set at the end of the test, so that no handler waits for ever."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is part of the tests; any other fault of a handler is not."""
        if not isinstance(error := sys.exception(), ConnectionError):
            self.faults.append(error)

    def in_turn(self, *turns: Callable[[Call], None]) -> None:
        """The nth request of a prompt gets the nth behaviour; the last one stays."""
        seen: Counter[str] = Counter()

        def behave(call: Call) -> None:
            seen[call.prompt] += 1
            turns[min(seen[call.prompt], len(turns)) - 1](call)

        self.behave = behave


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        call = Call(self)
        self.server.calls.append(call)
        self.server.behave(call)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()
    assert running.faults == []


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BASE_DELAY", 0.0)


def said(content: str | None, finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": content, **message}, "finish_reason": finish}],
        "usage": {"completion_tokens": 7},
    }


def prompt(text: str, line: int = 1) -> Prompt:
    return Prompt(f"id-{text}", ({"role": "user", "content": text},), f"prompts.jsonl line {line}")


def config(url: str, **settings: Any) -> GenerateConfig:
    return GenerateConfig(
        engine="endpoint", endpoint=EndpointConfig(base_url=url, **settings), max_new_tokens=50
    )


def collect(
    settings: GenerateConfig, prompts: Iterable[Prompt]
) -> list[tuple[Prompt, Answer | Rejected]]:
    async def run() -> list[tuple[Prompt, Answer | Rejected]]:
        async with asyncio.timeout(PATIENCE), aclosing(answers(prompts, settings, MODEL)) as found:
            return [pair async for pair in found]

    return asyncio.run(run())


def ask(settings: GenerateConfig, text: str = "hello") -> Answer | Rejected:
    ((_, found),) = collect(settings, [prompt(text)])
    return found


def text_of(found: Answer | Rejected) -> str:
    assert isinstance(found, Answer)
    return found.text


def refuse(call: Call) -> None:
    """As servers do that quote the key they refuse."""
    call.reply({"error": {"message": f"Incorrect API key: {call.authorization}"}}, 401)


# The request


def test_request_carries_all_settings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\n")
    thinking = {"chat_template_kwargs": {"thinking": True}}
    settings = config(server.url, api_key_env=KEY_VARIABLE, extra_body=thinking)
    settings = settings.model_copy(update={"temperature": 0.6, "top_p": 0.9})
    assert text_of(ask(settings)) == "hello"
    (call,) = server.calls
    assert call.path == "/v1/chat/completions"
    assert call.authorization == f"Bearer {KEY}"
    seed = call.body.pop("seed")
    assert 0 <= seed < 2**31
    assert call.body == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 50,
        "temperature": 0.6,
        "top_p": 0.9,
        "return_token_ids": True,
        **thinking,
    }


def test_each_prompt_has_its_own_seed_and_keeps_it(server: Server) -> None:
    for _ in range(2):
        collect(config(server.url, model="there"), [prompt("a"), prompt("b")])
    seeds = {name: {c.body["seed"] for c in server.calls if c.prompt == name} for name in "ab"}
    assert [len(seeds["a"]), len(seeds["b"]), len(seeds["a"] | seeds["b"])] == [1, 1, 2]
    assert {call.body["model"] for call in server.calls} == {"there"}


def test_a_proxy_is_not_asked_for_this_machine(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert text_of(ask(config(server.url))) == "hello"


@pytest.mark.parametrize("status", [400, 422])
def test_unknown_field_is_left_out_from_then_on(server: Server, status: int) -> None:
    def behave(call: Call) -> None:
        if "return_token_ids" in call.body:
            call.reply({"detail": [{"loc": ["body", "return_token_ids"]}]}, status)
        else:
            call.reply(said(call.prompt))

    server.behave = behave
    found = collect(config(server.url, in_flight=1, attempts=1), map(prompt, "abc"))
    assert [text_of(answer) for _, answer in found] == ["a", "b", "c"]
    assert ["return_token_ids" in call.body for call in server.calls] == [True] + [False] * 3


# The answer


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_its_own_field_is_marked(server: Server, field: str) -> None:
    server.behave = lambda call: call.reply(said("\n\nFour. ", **{field: " 2+2\n"}))
    assert text_of(ask(config(server.url))) == "<think> 2+2\n</think>\n\nFour. "


def test_reasoning_marks_are_the_configured_ones(server: Server) -> None:
    server.behave = lambda call: call.reply(said("b", reasoning="a"))
    marks = {"reasoning_open": "[T]", "reasoning_close": "[/T]"}
    assert text_of(ask(config(server.url).model_copy(update=marks))) == "[T]a[/T]b"


@pytest.mark.parametrize("empty", [None, ""])
def test_inline_reasoning_stays_as_it_is(server: Server, empty: str | None) -> None:
    inline = "<think>\n2+2\n</think>\n\nFour."
    server.behave = lambda call: call.reply(said(inline, reasoning=empty, reasoning_content=empty))
    assert text_of(ask(config(server.url))) == inline


@pytest.mark.parametrize("unused", [None, "", []])
def test_unused_reasoning_field_is_passed_over(server: Server, unused: Any) -> None:
    server.behave = lambda call: call.reply(said("c", reasoning_content=unused, reasoning="b"))
    assert text_of(ask(config(server.url))) == "<think>b</think>c"


def test_older_reasoning_field_comes_first(server: Server) -> None:
    server.behave = lambda call: call.reply(said("c", reasoning_content="a", reasoning="b"))
    assert text_of(ask(config(server.url))) == "<think>a</think>c"


def test_thinking_up_to_the_limit_is_an_answer_by_length(server: Server) -> None:
    server.behave = lambda call: call.reply(said(None, "length", reasoning="so long"))
    assert ask(config(server.url)) == Answer("<think>so long</think>", "length", None, None, 7)


def test_exact_token_ids_pass_through(server: Server) -> None:
    payload = said("hi")
    payload["prompt_token_ids"] = [1, 2, 3]
    payload["choices"][0]["token_ids"] = [40, 2]
    server.behave = lambda call: call.reply(payload)
    assert ask(config(server.url)) == Answer("hi", "stop", (1, 2, 3), (40, 2), 7)


@pytest.mark.parametrize("ids", [None, [], ["1"], "12"])
def test_ids_that_are_none_are_none(ids: Any) -> None:
    payload = said("hi") | {"prompt_token_ids": ids, "usage": None}
    payload["choices"][0]["token_ids"] = ids
    assert parse(prompt("a"), payload, GenerateConfig()) == Answer("hi", "stop", None, None, None)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (said("part", "content_filter"), "content_filter"),
        (said(None, "content_filter"), "content_filter"),
        (said(None, "tool_calls"), "tool_calls"),
        (said(""), "empty"),
        (said(" \n\t"), "empty"),
        (said("", reasoning=" "), "empty"),
        (said("!" * 40), "repetition"),
        (said("\n" + "!" * 9 + "\n", "length"), "repetition"),
        (said("", "length", reasoning="!" * 40), "repetition"),
        (said("!" * 40, reasoning="a thought"), "repetition"),
        (said("half an emoji \ud83d", "length"), "invalid text"),
    ],
)
def test_unfit_answers_are_rejected_at_once(
    server: Server, payload: dict[str, Any], reason: str
) -> None:
    server.behave = lambda call: call.reply(payload)
    assert ask(config(server.url)) == Rejected("id-hello", reason)
    assert len(server.calls) == 1


def test_a_short_run_of_one_character_is_an_answer(server: Server) -> None:
    server.behave = lambda call: call.reply(said("7" * 8))
    assert text_of(ask(config(server.url))) == "7" * 8


# Faults that pass


def test_retry_after_is_waited_for(server: Server) -> None:
    server.in_turn(
        lambda call: call.reply("slow down", 429, Retry_After="0.3"),
        lambda call: call.reply(said("fine")),
    )
    assert text_of(ask(config(server.url))) == "fine"
    first, second = server.calls
    assert second.time - first.time >= 0.3


def test_pause_doubles_scatters_and_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BASE_DELAY", 1.0)
    for attempt, longest in [(1, 1), (2, 2), (4, 8)]:
        pauses = [pause(attempt, 0) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert pause(1, 30) == 30
    assert pause(1, 3600) == 60
    assert pause(20, 0) == 60


@pytest.mark.parametrize("wrong", ["-1", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_unreadable_retry_after_is_no_wait(server: Server, wrong: str) -> None:
    server.in_turn(
        lambda call: call.reply("", 429, Retry_After=wrong), lambda call: call.reply(said("fine"))
    )
    assert text_of(ask(config(server.url))) == "fine"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_passing_statuses_are_tried_again(server: Server, status: int) -> None:
    server.in_turn(lambda call: call.reply("", status), lambda call: call.reply(said("fine")))
    assert text_of(ask(config(server.url))) == "fine"


def test_three_failures_then_success(server: Server) -> None:
    def fail(call: Call) -> None:
        call.reply("oops", 500)

    server.in_turn(fail, fail, fail, lambda call: call.reply(said("fine")))
    assert text_of(ask(config(server.url, attempts=4))) == "fine"
    assert len(server.calls) == 4


def test_connection_cut_in_the_body_is_tried_again(server: Server) -> None:
    server.in_turn(Call.cut, lambda call: call.reply(said("fine")))
    assert text_of(ask(config(server.url))) == "fine"
    assert len(server.calls) == 2


def test_no_answer_in_time_is_tried_again(server: Server) -> None:
    def hang(_: Call) -> None:
        server.released.wait(PATIENCE)

    server.in_turn(hang, lambda call: call.reply(said("fine")))
    assert text_of(ask(config(server.url, timeout_seconds=0.3))) == "fine"


@pytest.mark.parametrize(
    ("nonsense", "reason"),
    [
        ("<html>busy</html>", "no answer: not JSON"),
        ({}, "no answer: no choices"),
        ({"choices": []}, "no answer: no choices"),
        ({"choices": [{"message": None}]}, "no answer: no choices"),
        ([1], "no answer: no choices"),
        ({"error": {"code": 502, "message": "provider"}}, "no answer: error 502"),
        (said(None), "no answer: null content"),
        (said(None, reasoning=""), "no answer: null content"),
        (said("broken o", "error"), "no answer: finish_reason error"),
        (said("broken o", None), "no answer: finish_reason null"),
    ],
)
def test_lasting_nonsense_rejects_its_prompt_only(
    server: Server, nonsense: Any, reason: str
) -> None:
    server.behave = lambda call: call.reply(nonsense if call.prompt == "b" else said(call.prompt))
    pairs = collect(config(server.url, attempts=3), map(prompt, "abc"))
    found = {asked.id: answer for asked, answer in pairs}
    assert found.pop("id-b") == Rejected("id-b", reason)
    assert sorted(map(text_of, found.values())) == ["a", "c"]
    assert Counter(call.prompt for call in server.calls) == {"a": 1, "b": 3, "c": 1}


def test_nonsense_that_passes_is_forgotten(server: Server) -> None:
    server.in_turn(lambda call: call.reply(said(None)), lambda call: call.reply(said("fine")))
    assert text_of(ask(config(server.url))) == "fine"


def test_parse_says_that_asking_again_may_help() -> None:
    with pytest.raises(UnusableError, match="no choices"):
        parse(prompt("a"), {"choices": "none"}, GenerateConfig())


# Faults that end the run


def test_attempts_used_up_names_prompt_and_last_fault(server: Server) -> None:
    server.behave = lambda call: call.reply("all\nworkers busy", 503)
    with pytest.raises(DraftworksError) as caught:
        ask(config(server.url, attempts=2))
    assert "prompts.jsonl line 1 in 2 tries, at last 503: all workers busy" in str(caught.value)
    assert len(server.calls) == 2


def test_refused_key_is_one_message_without_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    caplog.set_level(logging.DEBUG)
    server.behave = refuse
    with pytest.raises(DraftworksError) as caught:
        ask(config(server.url, api_key_env=KEY_VARIABLE))
    message = str(caught.value)
    assert "401" in message
    assert "Incorrect API key: Bearer [key]" in message
    assert "api_key_env" in message
    assert KEY not in message
    assert "POST" in caplog.text
    assert KEY not in caplog.text
    assert len(server.calls) == 1


@pytest.mark.parametrize("status", [301, 400, 402, 403, 404, 413, 422])
def test_other_refusals_end_at_once(server: Server, status: int) -> None:
    server.behave = lambda call: call.reply("because " + "x" * 500, status)
    with pytest.raises(DraftworksError, match=f"line 1 with {status}: because x{{192}}\\. "):
        ask(config(server.url))
    assert len(server.calls) == 1


def test_a_key_in_a_passing_fault_is_hidden_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    # The key stands across the cut at 200 characters.
    server.behave = lambda call: call.reply("x" * 190 + str(call.authorization), 503)
    with pytest.raises(DraftworksError) as caught:
        ask(config(server.url, api_key_env=KEY_VARIABLE, attempts=2))
    assert "sk-" not in str(caught.value)


def test_a_failure_cancels_the_rest_and_keeps_what_was_yielded(server: Server) -> None:
    received = threading.Event()
    disconnected = threading.Event()

    def behave(call: Call) -> None:
        if call.prompt == "hangs":
            # The client hanging up ends this read.
            call._handler.connection.recv(1)
            disconnected.set()
            call._handler.close_connection = True
        elif call.prompt == "bad":
            received.wait(PATIENCE)
            call.reply("no", 403)
        else:
            call.reply(said(call.prompt))

    server.behave = behave
    found: list[str] = []

    async def run() -> None:
        prompts = map(prompt, ("hangs", "bad", "good"))
        async for asked, _ in answers(prompts, config(server.url), MODEL):
            found.append(asked.id)
            received.set()

    with pytest.raises(DraftworksError, match="403"):
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert found == ["id-good"]
    assert disconnected.wait(PATIENCE)


def test_leaving_early_cancels_the_rest(server: Server) -> None:
    def behave(call: Call) -> None:
        if call.prompt != "good":
            server.released.wait(PATIENCE)
        call.reply(said(call.prompt))

    server.behave = behave

    async def run() -> int:
        before = len(asyncio.all_tasks())
        prompts = map(prompt, ("a", "b", "good"))
        async with aclosing(answers(prompts, config(server.url), MODEL)) as found:
            async for _ in found:
                break
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)) == 0


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_fault_in_the_prompts_reaches_the_caller(server: Server, in_flight: int) -> None:
    def prompts() -> Iterator[Prompt]:
        yield prompt("a")
        yield prompt("b")
        raise DraftworksError("prompts.jsonl line 3: not JSON")

    async def run() -> int:
        before = len(asyncio.all_tasks())
        with pytest.raises(DraftworksError, match="line 3"):
            async for _ in answers(prompts(), config(server.url, in_flight=in_flight), MODEL):
                pass
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)) == 0


# Many prompts


def test_never_more_in_flight_than_allowed_and_prompts_are_pulled_lazily(server: Server) -> None:
    pulled: list[Prompt] = []
    at_barrier: list[int] = []
    # Breaks unless three requests are open at once; nine pass it in three rounds.
    barrier = threading.Barrier(3, action=lambda: at_barrier.append(len(pulled)))
    lock = threading.Lock()
    now = peak = 0

    def behave(call: Call) -> None:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        barrier.wait(PATIENCE)
        with lock:
            now -= 1
        call.reply(said(call.prompt))

    def prompts() -> Iterator[Prompt]:
        for number in range(9):
            pulled.append(prompt(f"p{number}"))
            yield pulled[-1]

    server.behave = behave
    assert len(collect(config(server.url, in_flight=3), prompts())) == 9
    assert peak == 3
    assert at_barrier == [3, 6, 9]


def test_answers_out_of_order_arrive_once_each(server: Server) -> None:
    others = threading.Event()

    def behave(call: Call) -> None:
        if call.prompt == "p0":
            others.wait(PATIENCE)
        call.reply(said(f"to {call.prompt}"))

    server.behave = behave
    order: list[str] = []

    async def run() -> None:
        prompts = (prompt(f"p{number}") for number in range(40))
        async for asked, found in answers(prompts, config(server.url, in_flight=8), MODEL):
            assert f"id-{text_of(found).removeprefix('to ')}" == asked.id
            order.append(asked.id)
            if len(order) == 39:
                others.set()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert order[-1] == "id-p0"
    assert sorted(order) == sorted(f"id-p{number}" for number in range(40))


def test_no_prompts_are_no_answers(server: Server) -> None:
    assert collect(config(server.url), []) == []
    assert server.calls == []


# Before the work


def check(settings: GenerateConfig) -> None:
    asyncio.run(probe(settings, MODEL))


def test_probe_passes_where_the_model_is(server: Server) -> None:
    server.behave = lambda call: call.reply({"data": [{"id": "other"}, {"id": MODEL}]})
    check(config(server.url))
    assert [call.path for call in server.calls] == ["/v1/models"]


def test_probe_lists_what_is_there(server: Server) -> None:
    server.behave = lambda call: call.reply({"data": [{"id": "far"}, {"id": "org/targets"}]})
    with pytest.raises(DraftworksError, match="among the 2 there, nearest first: org/targets, far"):
        check(config(server.url))


@pytest.mark.parametrize("payload", [{"data": []}, {}, {"data": None}, []])
def test_probe_of_a_server_without_models(server: Server, payload: Any) -> None:
    server.behave = lambda call: call.reply(payload)
    with pytest.raises(DraftworksError, match=r"no model 'org/target' among the 0 there\. Set"):
        check(config(server.url))


def test_probe_says_that_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        with pytest.raises(DraftworksError, match=r"ConnectError.*Start the server") as caught:
            check(config(url))
    assert url in str(caught.value)


def test_probe_with_a_wrong_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    server.behave = refuse
    with pytest.raises(DraftworksError, match=r"the list of models with 401") as caught:
        check(config(server.url, api_key_env=KEY_VARIABLE))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(404, "nothing here", "up to and including /v1"), (503, "loading", "503: loading")],
)
def test_probe_names_what_to_correct(server: Server, status: int, body: str, expected: str) -> None:
    server.behave = lambda call: call.reply(body, status)
    with pytest.raises(DraftworksError, match=expected):
        check(config(server.url))


def test_probe_of_something_that_is_no_api(server: Server) -> None:
    server.behave = lambda call: call.reply("<html>")
    with pytest.raises(DraftworksError, match="not JSON"):
        check(config(server.url))


def test_missing_key_names_the_variable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    settings = config(server.url, api_key_env=KEY_VARIABLE)
    with pytest.raises(DraftworksError, match=f"{KEY_VARIABLE} is not set"):
        check(settings)
    with pytest.raises(DraftworksError, match=f"{KEY_VARIABLE} is not set"):
        ask(settings)
    assert server.calls == []


@pytest.mark.parametrize("wrong", ["sk-geheim-\u00fc", "sk-two\nlines"])
def test_unusable_key_is_not_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, wrong)
    with pytest.raises(DraftworksError, match="holds no usable key") as caught:
        check(config(server.url, api_key_env=KEY_VARIABLE))
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000/v1", "ftp://host/v1", f"http://me:{KEY}@host/v1", "http://[::1/v1"]
)
def test_wrong_address_is_refused_and_a_password_in_it_not_shown(url: str) -> None:
    with pytest.raises(DraftworksError, match="base_url") as caught:
        check(config(url))
    assert KEY not in str(caught.value)
