"""Generation through a real OpenAI-compatible server on loopback, from HTTP to training."""

import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.engines import endpoint
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.samples import Sample
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.vocab import Vocab
from draftworks.target import Target
from draftworks.workspace import Workspace


class Server(ThreadingHTTPServer):
    """Answers a prompt by `reply`: a payload, or a status and a payload."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.reply: Callable[[str], Any] = lambda text: said(f"You said: {text}")

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is part of the tests; nothing else may go wrong here."""
        if not isinstance(sys.exception(), ConnectionError):
            raise


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        data = self.rfile.read(length)
        if len(data) < length:
            raise ConnectionAbortedError
        text = json.loads(data)["messages"][-1]["content"]
        self.server.asked.append(text)
        reply = self.server.reply(text)
        self._send(*(reply if isinstance(reply, tuple) else (200, reply)))

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def _send(self, status: int, payload: Any) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def said(content: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


def with_ids(payload: dict[str, Any], prompt: list[int], answer: list[int]) -> dict[str, Any]:
    payload["choices"][0]["token_ids"] = answer
    return payload | {"prompt_token_ids": prompt}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoint, "BASE_DELAY", 0.0)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def served(
    server: Server, tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> Callable[..., Generate]:
    """The stage, fed by the server; keywords change settings of `generate`."""

    def make(target: Target | None = None, **changes: Any) -> Generate:
        link = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "model": "tiny"}
        settings = {
            "engine": "endpoint",
            "endpoint": {**link, "attempts": 1, "in_flight": 4, **changes.pop("endpoint", {})},
            "keep_truncated": False,
            **changes,
        }
        sections = {"target": {"model": str(target.folder)}} if target else {}
        config = make_config(tmp_path, generate=settings, **sections)
        return Generate(config, Workspace(Path(config.workspace)))

    return make


def run(generate: Generate) -> dict[str, Sample]:
    """Samples by the text of their prompt."""
    generate.run(Progress())
    asked = {prompt.id: prompt.messages[-1]["content"] for prompt in generate.prompts}
    return {asked[item.conversation_id]: item for item in generate.store.samples()}


def tokens(target: Target, text: str) -> list[int]:
    return target.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def answer(sample: Sample) -> list[int]:
    return list(sample.token_ids[sample.prompt_tokens :])


# What becomes of an answer


def test_text_becomes_the_targets_own_tokens_with_its_stop_token(
    served: Callable[..., Generate], server: Server, tiny_target: Target
) -> None:
    generate = served()
    samples = run(generate)
    assert len(samples) == 24
    for text, sample in samples.items():
        prompt = tiny_target.render([{"role": "user", "content": text}])
        assert list(sample.token_ids[: sample.prompt_tokens]) == prompt
        assert answer(sample) == [*tokens(tiny_target, f"You said: {text}"), 1]
        assert (sample.text, sample.finish_reason) == (f"You said: {text}", "stop")
    assert generate.verify().complete
    assert sorted(server.asked) == sorted(samples)


def test_token_ids_of_the_server_are_taken_as_they_are(
    served: Callable[..., Generate], server: Server
) -> None:
    """Even where its prompt differs from ours: those are the tokens that it ran on."""
    server.reply = lambda text: with_ids(said(text), [7, 8, len(text)], [9, *text.encode(), 1])
    for text, sample in run(served()).items():
        assert sample.token_ids == (7, 8, len(text), 9, *text.encode(), 1)
        assert sample.prompt_tokens == 3
        assert sample.text == text


@pytest.mark.parametrize("foreign", [320, -1])
def test_token_ids_that_the_target_does_not_have_are_no_sample(
    served: Callable[..., Generate], server: Server, foreign: int
) -> None:
    """The server runs another model than the target: found out here, not in training."""
    server.reply = lambda text: with_ids(said(text), [7], [9, foreign])
    with pytest.raises(DraftworksError, match=r"none of the first 8 answers can be used: .*token"):
        run(served())


def test_a_served_pipeline_goes_on_to_vocabulary_and_states(
    served: Callable[..., Generate],
) -> None:
    generate = served()
    run(generate)
    for cls in (Vocab, Extract):
        stage = cls(generate.config, generate.workspace)
        stage.run(Progress())
        assert stage.verify().complete


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_between_its_marks(
    served: Callable[..., Generate], server: Server, tiny_target: Target, field: str
) -> None:
    server.reply = lambda text: said("\n\nFour.", **{field: "\n2 + 2\n"})
    expected = "[think]\n2 + 2\n[/think]\n\nFour."
    samples = run(served(reasoning_open="[think]", reasoning_close="[/think]"))
    for sample in samples.values():
        assert sample.text == expected
        assert answer(sample) == [*tokens(tiny_target, expected), 1]


def respelt(target: Target, folder: Path, template: Callable[[str], str]) -> Target:
    """The tiny target with another chat template."""
    shutil.copytree(target.folder, folder)
    path = folder / "chat_template.jinja"
    path.write_text(template(path.read_text()))
    return Target(str(folder), folder)


@pytest.mark.parametrize("space", ["", "\n"])
def test_reasoning_that_the_template_has_opened_is_not_opened_twice(
    served: Callable[..., Generate],
    server: Server,
    tiny_target: Target,
    tmp_path: Path,
    space: str,
) -> None:
    opened = respelt(
        tiny_target,
        tmp_path / "opened",
        lambda text: text.replace("assistant\n", f"assistant\n<think>{space}", 1),
    )
    server.reply = lambda text: said("Four.", reasoning_content="2 + 2")
    samples = run(served(opened))
    for text, sample in samples.items():
        whole = opened.text(sample.token_ids, special=True)
        assert whole == (
            f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>{space}"
            "2 + 2</think>Four.<|im_end|>"
        )
        assert answer(sample)[0] == tokens(tiny_target, "2")[0]


def test_truncated_answers_are_rejected_and_counted(
    served: Callable[..., Generate], server: Server
) -> None:
    server.reply = lambda text: said(f"A {text}", "length" if len(text) % 2 else "stop")
    generate = served()
    samples = run(generate)
    assert all(len(text) % 2 == 0 for text in samples)
    assert generate.store.rejected() == {"truncated": 24 - len(samples)}
    assert 0 < len(samples) < 24
    assert generate.verify().complete


def test_truncated_answers_are_kept_when_asked_for_and_get_no_stop_token(
    served: Callable[..., Generate], server: Server, tiny_target: Target
) -> None:
    server.reply = lambda text: said(f"A {text}", "length")
    generate = served(keep_truncated=True)
    samples = run(generate)
    assert len(samples) == 24
    for text, sample in samples.items():
        assert answer(sample) == tokens(tiny_target, f"A {text}")
    assert sum(row["truncated"] for row in generate.store.rows()) == 24


def test_every_rejection_keeps_its_reason(served: Callable[..., Generate], server: Server) -> None:
    replies: list[Any] = [
        said(""),
        said("!" * 30),
        said("x", "content_filter"),
        said(None),
        {"choices": []},
        said("fine"),
    ]
    server.reply = lambda text: replies[len(text) % len(replies)]
    generate = served()
    samples = run(generate)
    expected: dict[str, int] = {}
    for prompt in generate.prompts:
        number = len(prompt.messages[0]["content"]) % len(replies)
        reason = ["empty", "repetition", "content_filter", "no answer: null content"]
        if number < 5:
            name = [*reason, "no answer: no choices"][number]
            expected[name] = expected.get(name, 0) + 1
    assert generate.store.rejected() == expected
    assert len(samples) + sum(expected.values()) == 24


def test_prompts_that_render_to_the_same_tokens_make_one_sample(
    served: Callable[..., Generate], server: Server, tiny_target: Target, tmp_path: Path
) -> None:
    trimming = respelt(
        tiny_target,
        tmp_path / "trimming",
        lambda text: text.replace("['content']", "['content'] | trim"),
    )
    generate = served(trimming)
    path = Path(generate.config.prompts.path)
    path.write_text("\n".join(map(json.dumps, ["Hi", "Hi ", " Hi", "Ho"])))
    server.reply = lambda text: said("Hello!")
    run(generate)
    assert len(generate.store.index()) == 2
    assert generate.store.rejected() == {"duplicate": 2}
    assert generate.verify().complete


# Faults of the server


@pytest.mark.parametrize(
    ("nonsense", "reason"),
    [(said(""), "'empty'"), ({}, "'no answer: no choices'"), (said("0" * 99), "'repetition'")],
)
def test_a_server_that_only_talks_nonsense_is_given_up_early(
    served: Callable[..., Generate], server: Server, nonsense: Any, reason: str
) -> None:
    server.reply = lambda text: nonsense
    generate = served(part_size=3)
    expected = f"none of the first 3 answers can be used: {{{reason}: 3}}. Look at the server"
    with pytest.raises(DraftworksError) as caught:
        run(generate)
    assert expected in str(caught.value)
    assert str(generate.directory) in str(caught.value)
    assert len(server.asked) <= 3 + 4
    assert not generate.verify().complete


def test_nonsense_to_every_one_of_a_few_prompts_is_not_complete(
    served: Callable[..., Generate], server: Server
) -> None:
    server.reply = lambda text: said("")
    generate = served(part_size=64)
    generate.run(Progress())
    verdict = generate.verify()
    assert not verdict.complete
    assert verdict.problems == ("no usable answer; rejected: {'empty': 24}",)


def test_a_failing_server_costs_nothing_that_was_answered(
    served: Callable[..., Generate], server: Server
) -> None:
    def fail_in_the_end(text: str) -> Any:
        return (403, "no credit") if len(server.asked) > 13 else said(f"A {text}")

    server.reply = fail_in_the_end
    generate = served(part_size=5, endpoint={"in_flight": 1})
    with pytest.raises(DraftworksError, match="403"):
        run(generate)
    assert len(generate.store.conversations()) == 13
    server.reply = lambda text: said(f"B {text}")
    server.asked.clear()
    samples = run(generate)
    assert len(server.asked) == 11
    assert {text for text, sample in samples.items() if sample.text[0] == "B"} == set(server.asked)
    assert generate.verify().complete


def test_a_full_disk_costs_nothing_that_was_committed_and_rejects_nobody(
    small_disk: Path, make_config: Callable[..., PipelineConfig], server: Server
) -> None:
    """An answer that could not be written is asked for again, not taken for a repetition."""
    link = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "in_flight": 1}
    settings = {"engine": "endpoint", "endpoint": link, "part_size": 2}
    # Long enough that a part without samples would still fit where one with samples does not.
    server.reply = lambda text: said(random.Random(text).randbytes(3000).hex())
    config = make_config(small_disk, generate=settings)
    generate = Generate(config, Workspace(Path(config.workspace)))
    disk = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(disk.f_bavail * disk.f_bsize - 100_000))
    with pytest.raises(OSError, match="No space left"):
        run(generate)
    assert 0 < len(generate.store.conversations()) < 24
    assert generate.store.rejected() == {}
    assert generate.verify().problems == ()
    filler.unlink()
    assert len(run(generate)) == 24
    assert generate.verify().complete


def test_an_endpoint_that_is_not_there_is_found_before_the_work(
    served: Callable[..., Generate], server: Server
) -> None:
    found = {item.name: item for item in served().prepare()}
    assert found["endpoint"].passed
    found = {item.name: item for item in served(endpoint={"model": "other"}).prepare()}
    assert "no model 'other' among the 1 there" in found["endpoint"].detail
    assert not found["endpoint"].passed
    assert server.asked == []
