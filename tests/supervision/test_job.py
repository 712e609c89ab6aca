"""Supervised jobs, with real processes: started once, stopped gently, killed, found again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import pytest

from draftworks.supervision import job as job_module
from draftworks.supervision import runner
from draftworks.supervision.job import Job, State, acquire_lock, close_last_run, iso
from draftworks.supervision.runner import JobProgress

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0

WORKER = """
import os, subprocess, sys
from pathlib import Path
from draftworks.errors import DraftworksError
from draftworks.supervision.runner import run_job

folder = Path(sys.argv[1])

def append(name, text):
    with (folder / name).open("a") as file:
        print(text, file=file)

def work(progress):
    append("runs", os.getpid())
    print("Grüße from the worker", flush=True)
    progress.begin(10, "units", len((folder / "units").read_text().split())
                   if (folder / "units").exists() else 0)
    progress.phase("working", total=5)
    with (folder / "orders").open() as orders:
        for order in orders:
            match order.strip():
                case "unit":
                    append("units", "done")
                    progress.advance()
                case "step":
                    progress.step()
                case "fail":
                    raise DraftworksError("the sample 0f is damaged; remove it")
                case "crash":
                    raise KeyError("nothing")
                case "exit":
                    sys.exit(5)
                case "child":
                    child = subprocess.Popen(["sleep", "600"], close_fds=False)
                    append("children", child.pid)
                case "finish":
                    return
            progress.check_stop()

sys.exit(run_job(folder, work))
"""


def until(condition: Callable[[], object]) -> None:
    """Look at files until they say what they should."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Worker:
    """A job whose every step is ordered through a pipe."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        os.mkfifo(folder / "orders")
        self.job = Job(folder)
        self.orders: IO[str] | None = None

    def launch(self) -> bool:
        return self.job.launch_or_attach(
            [sys.executable, "-c", WORKER, *self.arguments], ENVIRONMENT
        )

    @property
    def arguments(self) -> list[str]:
        return [str(self.job.directory)]

    def start(self) -> None:
        """Launch, and wait until the work has begun."""
        assert self.launch()
        self.connect()

    def connect(self) -> None:
        # Opening waits for the reader.
        self.orders = (self.job.directory / "orders").open("w", buffering=1)

    def order(self, text: str) -> None:
        assert self.orders is not None
        self.orders.write(f"{text}\n")

    def unit(self) -> None:
        """Order one unit and wait until it is committed."""
        before = self.units
        self.order("unit")
        until(lambda: self.units > before)

    def ended(self) -> State:
        assert self.job.wait(PATIENCE)
        return self.job.state()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.job.wait(PATIENCE)

    def lines(self, name: str) -> list[str]:
        path = self.job.directory / name
        return path.read_text().split() if path.exists() else []

    @property
    def units(self) -> int:
        return len(self.lines("units"))

    @property
    def pid(self) -> int:
        return int(self.lines("runs")[-1])

    @property
    def outcomes(self) -> list[str]:
        return [row["outcome"] for row in self.job.history()]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: object, _trace: TracebackType | None
    ) -> None:
        if self.orders is not None:
            with suppress(BrokenPipeError):
                self.orders.close()
        for pid in map(int, (*self.lines("children"), *self.lines("runs"))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(tmp_path / "job") as worker:
        yield worker


# One job, one process


def test_a_job_runs_detached_and_leaves_its_record(worker: Worker) -> None:
    assert worker.job.state() is State.NEVER_STARTED
    worker.start()
    assert worker.job.state() is State.RUNNING
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
    assert int(worker.job.pid_file.read_text()) == worker.pid
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    record = worker.job.exit()
    assert (record["outcome"], record["error"]) == ("finished", "")
    (row,) = worker.job.history()
    assert row["started"] < row["ended"] == record["ended"] <= time.time()
    assert row["outcome"] == "finished"


LAUNCHER = """
import os, sys
from pathlib import Path
from draftworks.supervision.job import Job

open(sys.argv[1]).read()  # the starting shot
command = [sys.executable, "-c", *sys.argv[3:]]
print(Job(Path(sys.argv[2])).launch_or_attach(command, os.environ))
"""


def launchers(worker: Worker, shot: Path, count: int) -> list["subprocess.Popen[str]"]:
    arguments = [str(shot), str(worker.job.directory), WORKER, *worker.arguments]
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    return [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]


def test_of_many_starters_at_once_exactly_one_starts(worker: Worker, tmp_path: Path) -> None:
    shot = tmp_path / "shot"
    os.mkfifo(shot)
    starters = launchers(worker, shot, 6)
    shot.open("w").close()
    said = []
    # A starter that opens the pipe after the shot would wait for ever: shoot until all are gone.
    for starter in starters:
        while starter.poll() is None:
            with suppress(OSError):
                os.close(os.open(shot, os.O_WRONLY | os.O_NONBLOCK))
        assert starter.stdout is not None
        said.append(starter.stdout.read().strip())
        starter.stdout.close()
    assert sorted(said) == ["False"] * 5 + ["True"]
    worker.connect()
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    assert len(worker.lines("runs")) == 1


def test_the_job_outlives_its_starter_and_is_attached_to(worker: Worker, tmp_path: Path) -> None:
    shot = tmp_path / "shot"
    shot.write_text("")
    (starter,) = launchers(worker, shot, 1)
    assert starter.communicate(timeout=PATIENCE)[0].strip() == "True"
    worker.connect()
    worker.unit()
    assert worker.job.state() is State.RUNNING
    assert worker.launch() is False
    worker.unit()
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    assert len(worker.lines("runs")) == 1


def test_a_run_by_hand_finds_the_job_and_leaves_it_alone(worker: Worker) -> None:
    worker.start()
    command = [sys.executable, "-c", WORKER, *worker.arguments]
    found = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "job is running already" in found.stdout
    assert worker.job.state() is State.RUNNING
    assert worker.lines("runs") == [str(worker.pid)]
    worker.order("finish")
    assert worker.ended() is State.FINISHED


def test_a_finished_job_can_be_run_by_hand(worker: Worker) -> None:
    command = [sys.executable, "-c", WORKER, *worker.arguments]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    worker.connect()
    assert worker.launch() is False
    worker.order("finish")
    assert process.wait(PATIENCE) == 0
    assert worker.job.state() is State.FINISHED


def test_a_relaunch_clears_the_last_end(worker: Worker) -> None:
    worker.start()
    worker.order("fail")
    assert worker.ended() is State.FAILED
    worker.start()
    assert worker.job.exit() == {}
    assert worker.job.state() is State.RUNNING
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    assert worker.outcomes == ["failed", "finished"]


# Ends


def test_a_killed_job_is_lost_and_its_lock_free(worker: Worker) -> None:
    worker.start()
    worker.unit()
    worker.kill()
    assert worker.job.state() is State.LOST
    assert (worker.job.exit(), worker.outcomes) == ({}, [])
    worker.start()
    assert worker.outcomes == ["lost"]
    worker.unit()
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    assert worker.outcomes == ["lost", "finished"]
    lost, finished = worker.job.history()
    assert lost["started"] <= lost["ended"] <= finished["started"]
    assert worker.units == 2


def test_a_lock_is_not_kept_by_children_of_the_job(worker: Worker) -> None:
    worker.start()
    worker.order("child")
    until(lambda: worker.lines("children"))
    worker.kill()
    os.kill(int(worker.lines("children")[0]), 0)  # lives
    assert worker.job.state() is State.LOST


def test_stopping_ends_after_the_unit_with_a_record(worker: Worker) -> None:
    worker.start()
    worker.unit()
    assert worker.job.stop()
    worker.order("unit")
    assert worker.ended() is State.STOPPED
    assert worker.units == 2
    record = worker.job.exit()
    assert (record["outcome"], record["error"]) == ("stopped", "")
    assert worker.outcomes == ["stopped"]
    status = worker.job.status()
    assert status is not None
    assert (status.done, status.total, status.unit) == (2, 10, "units")


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]
)
def test_a_second_signal_kills(worker: Worker, numbers: tuple[signal.Signals, ...]) -> None:
    worker.start()
    worker.unit()
    # Two different ones: two equal ones in one moment are one to the kernel.
    for number in numbers:
        os.kill(worker.pid, number)
    assert worker.ended() is State.LOST
    assert worker.units == 1


def test_ending_a_job_that_does_not_listen_takes_its_children_along(worker: Worker) -> None:
    worker.start()
    worker.order("child")
    until(lambda: worker.lines("children"))
    worker.job.end(grace=0.2)
    assert worker.job.state() is State.LOST
    child = Path("/proc", worker.lines("children")[0], "stat")
    until(lambda: not child.exists() or child.read_text().split()[2] == "Z")


def test_ending_a_job_that_listens_is_a_stop(worker: Worker) -> None:
    worker.start()
    worker.unit()
    assert worker.orders is not None
    os.kill(worker.pid, signal.SIGSTOP)  # both arrive before it goes on
    worker.order("unit")
    assert worker.job.stop()
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.ended() is State.STOPPED


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is none of the job's."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        assert process.poll() is None
        process.kill()


def test_nobody_is_stopped_when_nothing_runs(
    worker: Worker, bystander: "subprocess.Popen[bytes]"
) -> None:
    assert not worker.job.stop()
    worker.start()
    worker.order("finish")
    assert worker.ended() is State.FINISHED
    # The number may belong to another process by now.
    worker.job.pid_file.write_text(str(bystander.pid))
    assert not worker.job.stop()
    worker.job.end(grace=0)


def test_a_job_that_is_just_starting_is_not_mistaken_for_its_last_run(
    worker: Worker, bystander: "subprocess.Popen[bytes]"
) -> None:
    """Between the starter's lock and the new process, the old process id is nobody's."""
    worker.job.pid_file.write_text(str(bystander.pid))
    lock = acquire_lock(worker.job.directory)
    assert lock is not None
    close_last_run(worker.job.directory)
    assert worker.job.alive()
    assert not worker.job.stop()
    os.close(lock)


# Faults


def test_a_fault_for_people_is_its_message_alone(worker: Worker) -> None:
    worker.start()
    worker.order("fail")
    assert worker.ended() is State.FAILED
    assert worker.job.exit()["error"] == "the sample 0f is damaged; remove it"
    assert worker.job.tail(1) == "error: the sample 0f is damaged; remove it"
    assert "Traceback" not in worker.job.tail(100)
    assert worker.outcomes == ["failed"]


def test_a_fault_of_the_program_leaves_its_traceback_in_the_log(worker: Worker) -> None:
    worker.start()
    worker.order("crash")
    assert worker.ended() is State.FAILED
    assert worker.job.exit()["error"] == "KeyError: 'nothing'"
    assert "Traceback" in worker.job.tail(100)


def test_an_exit_in_the_middle_of_the_work_is_no_success(worker: Worker) -> None:
    worker.start()
    worker.order("exit")
    assert worker.ended() is State.FAILED


def test_a_process_that_dies_at_once_is_lost_and_says_why(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.launch_or_attach([sys.executable, "-c", "import nothing_of_this_name"], os.environ)
    assert job.wait(PATIENCE)
    assert job.state() is State.LOST
    assert "No module named 'nothing_of_this_name'" in job.tail()


def test_a_command_that_is_not_there_leaves_the_lock_free(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(FileNotFoundError):
        job.launch_or_attach(["/no/such/program"], os.environ)
    assert not job.alive()


# Looking at it


def test_the_status_counts_committed_units(worker: Worker) -> None:
    worker.start()
    begun = time.time()
    for _ in range(3):
        worker.unit()
    until(lambda: (status := worker.job.status()) is not None and status.done == 3)
    status = worker.job.status()
    assert status is not None
    assert (status.phase, status.total, status.unit) == ("working", 10, "units")
    assert status.pid == worker.pid
    assert status.started < begun <= status.heartbeat
    worker.kill()
    worker.start()
    until(lambda: (status := worker.job.status()) is not None and status.phase == "working")
    status = worker.job.status()
    assert status is not None
    assert status.done == 3


def test_a_watcher_reads_the_course_and_the_estimate(worker: Worker) -> None:
    worker.start()
    assert worker.orders is not None
    until(lambda: (status := worker.job.status()) is not None and status.phase_total == 5)
    until(worker.job.trace)
    for _ in range(2):
        print("step", file=worker.orders, flush=True)
    until(lambda: worker.job.trace()[-1].made == 2)
    status, estimate = worker.job.status(), worker.job.estimate()
    assert status is not None
    assert estimate is not None
    assert status.counted == "working 2 of 5"
    assert status.left == 3
    assert estimate.sentence == "estimating"
    worker.kill()
    assert worker.job.estimate() is None


def test_without_a_heartbeat_a_living_job_is_stalled(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(job_module, "STALLED_SECONDS", 0)
    assert worker.job.state() is State.STALLED
    monkeypatch.setattr(job_module, "STALLED_SECONDS", 120)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.job.state() is State.RUNNING


def test_the_tail_is_the_end_of_the_log_of_all_runs(worker: Worker) -> None:
    assert worker.job.tail() == ""
    for _ in range(2):
        worker.start()
        worker.order("finish")
        assert worker.ended() is State.FINISHED
    assert worker.job.tail(100).count("Grüße from the worker") == 2
    assert worker.job.tail(1).endswith("working")
    with worker.job.log.open("ab") as log:
        log.write(b"half a character \xc3")
    assert worker.job.tail(1) == "half a character \ufffd"


def test_a_watcher_never_stands_in_the_way_of_a_starter(tmp_path: Path) -> None:
    job = Job(tmp_path)
    lock = acquire_lock(tmp_path)
    assert lock is not None
    assert job.alive()
    assert acquire_lock(tmp_path) is None
    os.close(lock)
    for _ in range(100):
        assert not job.alive()
        lock = acquire_lock(tmp_path)
        assert lock is not None
        os.close(lock)


def test_the_heartbeat_survives_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "HEARTBEAT_SECONDS", 0.01)
    progress = JobProgress(small_disk)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(2_000_000))
    attempt = small_disk / "status.new"
    until(lambda: attempt.exists() and attempt.stat().st_size == 0)
    (small_disk / "filler").unlink()
    freed = time.time()
    until(lambda: (status := Job(small_disk).status()) is not None and status.heartbeat > freed)
    progress.stop()


def test_times_are_told_in_utc() -> None:
    assert iso(0.0625) == "1970-01-01T00:00:00.062+00:00"
