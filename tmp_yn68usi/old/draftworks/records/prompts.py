"""Prompts from a file: JSON Lines or Parquet, in the forms people have them.

A line is a string, an object with `prompt`, OpenAI `messages`, or ShareGPT `conversations`.
Answers that the file may hold are not used: the target writes its own (about +10 % acceptance,
see field notes on regenerated data).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.config import PromptsConfig
from draftworks.errors import DraftworksError
from draftworks.workspace import digest

SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant"}
ROLES = ("system", "user", "assistant")
KNOWN_FIELDS = {"prompt", "messages", "conversations", "id", "category"}
SURROGATE = re.compile("[\ud800-\udfff]")
FORMS = (
    'a string, {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}'
)


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the turn that the target is to answer.

    id: digest of the messages, also the conversation's id in every later record.
    origin: "file line 12", for messages to people.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    origin: str


def prompts_file(config: PromptsConfig) -> Path:
    """The file that `config` names. Raises DraftworksError when there is none."""
    if config.path == "demo":
        return Path(str(resources.files("draftworks") / "data" / "prompts.jsonl"))
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise DraftworksError(
            f"prompts {path}: no such file. Give a .jsonl or .parquet file in `prompts.path`."
        )
    return path


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """All prompts in file order, exact repetitions left out.

    Raises DraftworksError naming file and line for an empty file, a line that is no JSON,
    fields that are not known, and a conversation without a user's turn.
    """
    path = prompts_file(config)
    prompts: dict[str, Prompt] = {}
    for number, row in _rows(path):
        origin = f"{path.name} line {number}"
        messages = _messages(row, origin)
        prompt = Prompt(digest(messages), tuple(messages), origin)
        prompts.setdefault(prompt.id, prompt)
        if len(prompts) == config.limit:
            break
    if not prompts:
        raise DraftworksError(f"prompts {path}: the file is empty; each line is {FORMS}")
    return list(prompts.values())


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        try:
            batches = pq.ParquetFile(path).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from enumerate((_without_nulls(row) for row in rows), start=1)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DraftworksError(f"prompts {path}: not a readable Parquet file: {error}") from None
        return
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
        except UnicodeDecodeError as error:
            raise DraftworksError(f"prompts {path}: not UTF-8 text: {error.reason}") from None
        except (ValueError, RecursionError) as error:
            fault = str(error)
            if isinstance(error, json.JSONDecodeError):
                fault = f"{error.msg} at column {error.colno}"
            raise DraftworksError(
                f"prompts {path.name} line {number}: not JSON ({fault}): "
                f"{line.strip()[:60]!r}. Each line is {FORMS}."
            ) from None


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _messages(row: Any, origin: str) -> list[dict[str, str]]:
    """The conversation of one row, cut after its last user turn."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise DraftworksError(f"prompts {origin}: expected {FORMS}, found {type(row).__name__}")
    if unknown := sorted(set(row) - KNOWN_FIELDS):
        raise DraftworksError(
            f"prompts {origin}: unknown fields {', '.join(unknown)}. Each line is {FORMS}; "
            "`id` and `category` may stand beside it."
        )
    match row:
        case {"prompt": str(text)}:
            turns = [{"role": "user", "content": text}]
        case {"messages": list(messages)}:
            turns = [_turn(turn, "role", "content", origin) for turn in messages]
        case {"conversations": list(messages)}:
            turns = [_turn(turn, "from", "value", origin) for turn in messages]
        case _:
            raise DraftworksError(
                f"prompts {origin}: expected {FORMS}, found "
                f"{json.dumps(row, ensure_ascii=False)[:80]}"
            )
    while turns and turns[-1]["role"] != "user":
        turns.pop()
    if not turns:
        raise DraftworksError(f"prompts {origin}: no user turn in the conversation")
    if any(SURROGATE.search(turn["content"]) for turn in turns):
        raise DraftworksError(f"prompts {origin}: half a surrogate pair, which is no text")
    if not turns[-1]["content"].strip():
        raise DraftworksError(f"prompts {origin}: the user's turn is empty")
    return turns


def _turn(turn: Any, role: str, content: str, origin: str) -> dict[str, str]:
    values = turn if isinstance(turn, dict) else {}
    name, text = values.get(role), values.get(content)
    known = SHAREGPT_ROLES if role == "from" else {name: name for name in ROLES}
    if not isinstance(name, str) or name not in known or not isinstance(text, str):
        raise DraftworksError(
            f"prompts {origin}: a turn needs {role!r} (one of {', '.join(known)}) and the text "
            f"{content!r}, found {json.dumps(turn, ensure_ascii=False)[:80]}"
        )
    return {"role": known[name], "content": text}
