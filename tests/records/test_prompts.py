"""Prompts in every form that people have them, and in the ones that must be refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftworks.config import PromptsConfig
from draftworks.errors import DraftworksError
from draftworks.records.prompts import Prompt, read_prompts

USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Because."}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(folder: Path, content: bytes, *, name: str = "p.jsonl", **settings: Any) -> list[Prompt]:
    path = folder / name
    path.write_bytes(content)
    return read_prompts(PromptsConfig(path=str(path), **settings))


def refused(folder: Path, content: bytes, **settings: Any) -> str:
    with pytest.raises(DraftworksError) as caught:
        read(folder, content, **settings)
    return str(caught.value)


def parquet(folder: Path, rows: list[dict[str, Any]]) -> list[Prompt]:
    path = folder / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return read_prompts(PromptsConfig(path=str(path)))


FORMS = [
    pytest.param("Why?", [USER], id="string"),
    pytest.param({"prompt": "Why?", "id": "a", "category": "b"}, [USER], id="prompt"),
    pytest.param({"messages": [USER]}, [USER], id="messages"),
    pytest.param({"messages": [SYSTEM, USER]}, [SYSTEM, USER], id="system"),
    pytest.param({"messages": [USER, ANSWER]}, [USER], id="answered"),
    pytest.param({"messages": [USER, ANSWER, SYSTEM]}, [USER], id="trailing-system"),
    pytest.param({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER], id="turns"),
    pytest.param(
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
                {"from": "user", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        [SYSTEM, USER, ANSWER, USER],
        id="sharegpt",
    ),
]


@pytest.mark.parametrize(("row", "messages"), FORMS)
def test_every_form_becomes_the_turns_up_to_the_last_of_the_user(
    tmp_path: Path, row: Any, messages: list[dict[str, str]]
) -> None:
    (prompt,) = read(tmp_path, lines(row))
    assert list(prompt.messages) == messages
    assert prompt.origin == "p.jsonl line 1"


@pytest.mark.parametrize(("row", "messages"), [form for form in FORMS if form.id != "string"])
def test_parquet_holds_the_same_forms(
    tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]
) -> None:
    (prompt,) = parquet(tmp_path, [row])
    assert list(prompt.messages) == messages
    assert prompt.origin == "p.parquet line 1"


def test_parquet_may_mix_forms_in_null_filled_columns(tmp_path: Path) -> None:
    found = parquet(tmp_path, [{"prompt": "a", "messages": None}, {"messages": [USER]}])
    assert [prompt.messages[0]["content"] for prompt in found] == ["a", "Why?"]


def test_the_shipped_prompts_can_be_read() -> None:
    found = read_prompts(PromptsConfig())
    assert len(found) >= 400
    assert len({prompt.id for prompt in found}) == len(found)


def test_ids_depend_on_the_messages_alone(tmp_path: Path) -> None:
    forms = ["Why?", {"prompt": "Why?", "id": "x"}, {"messages": [USER, ANSWER]}]
    ids = [read(tmp_path, b"\n" * n + lines(form))[0].id for n, form in enumerate(forms)]
    assert ids == ["51ce2e32ea943357"] * 3
    assert read(tmp_path, lines("why?"))[0].id not in ids
    assert read(tmp_path, lines({"messages": [SYSTEM, USER]}))[0].id not in ids


def test_repetitions_and_blank_lines_are_left_out_in_file_order(tmp_path: Path) -> None:
    found = read(tmp_path, lines("b", "a") + b"\n  \n" + lines("b", "c", {"prompt": "a"}))
    assert [prompt.messages[0]["content"] for prompt in found] == ["b", "a", "c"]
    assert [prompt.origin[-6:] for prompt in found] == ["line 1", "line 2", "line 6"]


def test_limit_counts_distinct_prompts_and_reads_no_further(tmp_path: Path) -> None:
    found = read(tmp_path, lines("a", "a", "b") + b"no JSON\n", limit=2)
    assert [prompt.messages[0]["content"] for prompt in found] == ["a", "b"]


def test_text_of_any_script_survives(tmp_path: Path) -> None:
    text = "Grüße, 你好, 👋\u2028\x85 \\ \" '"
    for content in (lines(text), json.dumps(text, ensure_ascii=False).encode()):
        assert read(tmp_path, content)[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"", ["p.jsonl", "the file is empty"], id="empty"),
        pytest.param(b"\n \n", ["p.jsonl", "the file is empty"], id="blank"),
        pytest.param(
            lines("a") + b'{"prompt": x}\n', ["line 2", "not JSON", "column 12"], id="json"
        ),
        pytest.param(lines("a")[:-3], ["line 1", "not JSON", "column 1"], id="torn"),
        pytest.param(lines("a") + b'"\xff"\n', ["p.jsonl", "not UTF-8"], id="utf-8"),
        pytest.param(lines({"text": "a"}), ["line 1", "unknown fields text"], id="unknown"),
        pytest.param(
            lines({"prompt": "a", "n": 1, "b": 2}), ["line 1", "unknown fields b, n"], id="extra"
        ),
        pytest.param(lines(3), ["line 1", "found int"], id="number"),
        pytest.param(lines(["a"]), ["line 1", "found list"], id="list"),
        pytest.param(lines(None), ["line 1", "found NoneType"], id="null"),
        pytest.param(lines({"prompt": 3}), ["line 1", "expected", '{"prompt": 3}'], id="type"),
        pytest.param(lines({"id": "a"}), ["line 1", "expected"], id="id-only"),
        pytest.param(lines({"messages": "a"}), ["line 1", "expected"], id="messages-type"),
        pytest.param(lines({"messages": ["a"]}), ["line 1", "a turn needs 'role'"], id="turn-type"),
        pytest.param(lines({"messages": []}), ["line 1", "no user turn"], id="no-turns"),
        pytest.param(
            lines({"messages": [SYSTEM, ANSWER]}), ["line 1", "no user turn"], id="no-user"
        ),
        pytest.param(
            lines({"messages": [{"role": "tool", "content": "a"}]}),
            ["line 1", "one of system, user, assistant", '"tool"'],
            id="role",
        ),
        pytest.param(
            lines({"messages": [{"role": ["user"], "content": "a"}]}), ["line 1"], id="role-type"
        ),
        pytest.param(
            lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
            ["line 1", "the text 'content'"],
            id="content-parts",
        ),
        pytest.param(
            lines({"conversations": [{"from": "robot", "value": "a"}]}),
            ["line 1", "a turn needs 'from'", "human"],
            id="sharegpt-role",
        ),
        pytest.param(
            lines({"conversations": [{"from": "human", "value": None}]}),
            ["line 1"],
            id="null-value",
        ),
        pytest.param(lines("  "), ["line 1", "the user's turn is empty"], id="empty-turn"),
        pytest.param(b'"\\ud83d"\n', ["line 1", "half a surrogate pair"], id="surrogate"),
        pytest.param(b"[" * 100_000 + b"\n", ["line 1", "not JSON"], id="deep"),
        pytest.param(b"1" * 5_000 + b"\n", ["line 1", "not JSON"], id="long-number"),
    ],
)
def test_bad_input_is_one_message_that_says_where(
    tmp_path: Path, content: bytes, expected: list[str]
) -> None:
    message = refused(tmp_path, content)
    assert message.startswith("prompts ")
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DraftworksError, match=f"{name}: no such file"):
        read_prompts(PromptsConfig(path=str(tmp_path / name)))


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path, [{"prompt": f"question {n}"} for n in range(2000)])
    whole = (tmp_path / "p.parquet").read_bytes()
    page = whole[:100] + bytes(200) + whole[300:]
    for damaged in (b"", b"no parquet", whole[:-200], whole[200:], page):
        message = refused(tmp_path, damaged, name="p.parquet")
        assert "p.parquet: not a readable Parquet file" in message


def test_parquet_rows_are_checked_as_lines_are(tmp_path: Path) -> None:
    with pytest.raises(DraftworksError, match=r"p\.parquet line 1: unknown fields text"):
        parquet(tmp_path, [{"text": "a"}])
    with pytest.raises(DraftworksError, match=r"p\.parquet line 2: expected"):
        parquet(tmp_path, [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(DraftworksError, match="the file is empty"):
        parquet(tmp_path, [])
