"""trace.jsonl: bounded, readable after a kill, and blind to what is no pace."""

from pathlib import Path

from draftworks.supervision.trace import MOST_ROWS, Row, TraceWriter, points, read_trace


def row(time: float, done: int, section: int = 1, total: int = 10_000) -> Row:
    return Row(time, "working", section, done, total, "units", 0, 0)


def test_only_changes_are_rows(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for second in range(100):
        writer.note(row(second, second // 10))
    assert [found.done for found in read_trace(tmp_path / "trace.jsonl")] == list(range(10))


def test_a_trace_stays_bounded_and_keeps_its_whole_course(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for second in range(3 * MOST_ROWS):
        writer.note(row(second, second))
    rows = read_trace(tmp_path / "trace.jsonl")
    assert MOST_ROWS / 2 < len(rows) <= MOST_ROWS
    course = points(rows)
    assert course[0].made == 0
    assert course[-1][1:] == (3 * MOST_ROWS - 1, 3 * MOST_ROWS - 1)


def test_a_job_that_restarts_for_ever_stays_bounded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for second in range(2 * MOST_ROWS):
        writer.note(row(second, second, section=second))
    assert len(read_trace(tmp_path / "trace.jsonl")) <= MOST_ROWS


def test_a_restart_is_a_break_and_what_it_finds_is_no_pace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = TraceWriter(path)
    for unit in range(5):
        first.note(row(10 * unit, 100 + unit))
    second = TraceWriter(path)
    second.note(row(5000, 0, section=0, total=0))
    second.note(row(5001, 102))  # back to what was durable
    second.note(row(5011, 103))
    assert points(read_trace(path))[-1][1:] == (50, 5)


def test_a_torn_line_is_no_row_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    writer.note(row(0, 0))
    writer.note(row(1, 1))
    path.write_bytes(path.read_bytes()[:-20])
    assert [found.done for found in read_trace(path)] == [0]
    TraceWriter(path).note(row(9, 5))
    assert [found.done for found in read_trace(path)] == [0, 5]


def test_a_phase_has_a_course_of_its_own(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for shard in range(5):
        writer.note(Row(30 * shard, "loading weights", 2, 7, 100, "samples", shard, 64))
    course = points(read_trace(tmp_path / "trace.jsonl"), in_phase=True)
    assert course[-1][1:] == (120, 4)
