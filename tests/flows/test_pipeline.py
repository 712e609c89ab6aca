"""The pipeline orders what hosts do, and says what became of it."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Completed, Failed, Running

from draftworks.config import PipelineConfig
from draftworks.preparation.environment import source_version
from draftworks.stages import STAGES
from flows.pipeline import pipeline
from tasks.host_runs import cancel_host_runs
from tasks.jobs import job_task_name, run_job

NAMES = ("check", *STAGES, "report")
Outcome = Callable[[FlowRun], State[Any] | None]


class Host(threading.Thread):
    """Takes the runs that the pipeline orders and ends them as a test says: the worker of a host
    whose work takes no time. `outcomes` holds those of each name's runs, in turn; a run of which
    nothing is said completes, and one whose outcome is None is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.configs: list[PipelineConfig] = []
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.ended = threading.Event()
        self._context = copy_context()  # with the settings of the test server
        with get_client(sync_client=True) as client:
            self._names = {self._declare(client, name): name for name in NAMES}

    def run(self) -> None:
        self._context.run(self._work)

    def _declare(self, client: SyncPrefectClient, name: str) -> Any:
        flow = client.create_flow_from_name(name)
        return client.create_deployment(flow, "host", enforce_parameter_schema=False)

    def _work(self) -> None:
        scheduled = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
        ours = DeploymentFilter(id=DeploymentFilterId(any_=list(self._names)))
        seen = set()
        with get_client(sync_client=True) as client:
            while not self.ended.wait(0.05):
                for run in client.read_flow_runs(
                    deployment_filter=ours, flow_run_filter=FlowRunFilter(state=scheduled)
                ):
                    if run.id in seen:
                        continue
                    seen.add(run.id)
                    name = self._names[run.deployment_id]
                    self.started.append(name)
                    self.configs.append(PipelineConfig.model_validate(run.parameters["config"]))
                    turns = self.outcomes[name]
                    state = turns.pop(0)(run) if turns else Completed(message=f"{name} is done")
                    if state is not None:
                        client.set_flow_run_state(run.id, state, force=True)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr("tasks.host_runs.POLL_SECONDS", 0.05)
    host = Host()
    host.start()
    yield host
    host.ended.set()
    host.join()


def test_every_step_waits_for_what_it_needs(
    host: Host, tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    host.outcomes["report"] = [lambda _: Completed(message="# acceptance length 2.34")]
    pipeline(tiny_config)
    assert host.started[:2] == ["check", "generate"]
    assert set(host.started[2:4]) == {"vocab", "extract"}
    assert host.started[4:] == ["train", "evaluate", "publish", "report"]
    plain = [
        config.model_copy(update={"gates": tiny_config.gates, "jobs": tiny_config.jobs})
        for config in host.configs
    ]
    assert all(config == tiny_config for config in plain)
    required = {config.jobs.requires.get("draftworks") for config in host.configs[1:-1]}
    assert required == {f"=={source_version()}"}
    assert shown("report").data == "# acceptance length 2.34"


@pytest.mark.parametrize("name", ["vocab", "extract"])
def test_a_failed_stage_fails_the_pipeline_with_its_own_words(
    host: Host, tiny_config: PipelineConfig, name: str
) -> None:
    """And training, which needs both, does not start."""
    host.outcomes[name] = [lambda _: Failed(message="DraftworksError: the disk is full")]
    state = pipeline(tiny_config, return_state=True)
    assert state.is_failed()
    assert state.message.endswith(f"{name} is Failed: DraftworksError: the disk is full")
    assert set(host.started) == {"check", "generate", "vocab", "extract"}


def test_a_failing_check_starts_no_stage(host: Host, tiny_config: PipelineConfig) -> None:
    host.outcomes["check"] = [lambda _: Failed(message="vocab.size is too large")]
    state = pipeline(tiny_config, return_state=True)
    assert state.message.endswith("check is Failed: vocab.size is too large")
    assert host.started == ["check"]


def test_a_dry_run_ends_after_the_checks(host: Host, tiny_config: PipelineConfig) -> None:
    pipeline(tiny_config, dry_run=True)
    assert host.started == ["check"]


def test_a_second_attempt_is_a_new_run(host: Host, tiny_config: PipelineConfig) -> None:
    """With the key of the first it would be handed the failed run again, for ever."""
    host.outcomes["check"] = [lambda _: Failed(message="the network was down")]
    again = pipeline.with_options(retries=1, retry_delay_seconds=0)
    assert again(tiny_config, dry_run=True, return_state=True).is_completed()
    assert host.started == ["check", "check"]


def test_a_cancelled_pipeline_cancels_what_it_started(
    host: Host, tiny_config: PipelineConfig
) -> None:
    def cancel_the_pipeline(run: FlowRun) -> State[Any] | None:
        with get_client(sync_client=True) as client:
            assert run.parent_task_run_id is not None
            parent = client.read_task_run(run.parent_task_run_id).flow_run_id
            cancel_host_runs(pipeline, client.read_flow_run(parent), Cancelled())
            state = client.read_flow_run(run.id).state
        return None if state and state.is_cancelled() else Failed(message="nobody cancelled it")

    host.outcomes["generate"] = [cancel_the_pipeline]
    state = pipeline(tiny_config, return_state=True)
    assert state.is_failed()
    assert "generate is Cancelled" in state.message
    assert host.started == ["check", "generate"]


def test_a_stage_is_ordered_while_the_one_before_it_works(
    host: Host, tiny_config: PipelineConfig
) -> None:
    """And only that one: each waits until the stage before it has come to its job."""
    extracting: list[FlowRun] = []

    def works(run: FlowRun) -> None:
        extracting.append(run)
        with get_client(sync_client=True) as client:
            client.create_task_run(
                run_job, run.id, "0", name=job_task_name("extract"), state=Running()
            )

    def ends_extract(run: FlowRun) -> State[Any]:
        assert run.parameters["config"]["gates"]["on_incomplete"] == "wait"
        assert "evaluate" not in host.started
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(extracting[0].id, Completed(), force=True)
        return Completed()

    host.outcomes["extract"] = [works]
    host.outcomes["train"] = [ends_extract]
    pipeline(tiny_config)
    assert host.started[4:] == ["train", "evaluate", "publish", "report"]


def test_without_preparation_each_stage_waits_for_the_end_of_the_last(
    host: Host, tiny_config: PipelineConfig
) -> None:
    def still_works(run: FlowRun) -> None:
        with get_client(sync_client=True) as client:
            client.create_task_run(
                run_job, run.id, "0", name=job_task_name("generate"), state=Running()
            )

        def end() -> None:
            assert host.started == ["check", "generate"]
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(run.id, Completed(), force=True)

        context = copy_context()
        threading.Timer(0.5, lambda: context.run(end)).start()

    host.outcomes["generate"] = [still_works]
    jobs = tiny_config.jobs.model_copy(update={"prepare": False})
    pipeline(tiny_config.model_copy(update={"jobs": jobs}))
    assert len(host.started) == len(NAMES)
    assert {config.gates.on_incomplete for config in host.configs} == {"fail"}


def test_what_waits_for_a_failed_stage_is_cancelled_and_what_works_goes_on(
    host: Host, tiny_config: PipelineConfig
) -> None:
    """vocab fails while extraction works for hours and training waits for both."""
    works: dict[str, FlowRun] = {}

    def at_work(name: str) -> Outcome:
        def outcome(run: FlowRun) -> None:
            works[name] = run
            with get_client(sync_client=True) as client:
                client.create_task_run(
                    run_job, run.id, "0", name=job_task_name(name), state=Running()
                )

        return outcome

    def vocab_fails(run: FlowRun) -> None:
        works["train"] = run
        with get_client(sync_client=True) as client:
            failure = Failed(message="DraftworksError: no room")
            client.set_flow_run_state(works["vocab"].id, failure, force=True)

        def extract_ends_when_train_is_cancelled() -> None:
            with get_client(sync_client=True) as client:
                while not client.read_flow_run(run.id).state.is_cancelled():  # it had not started
                    host.ended.wait(0.05)
                extract = client.read_flow_run(works["extract"].id)
                assert extract.state.is_scheduled()  # nobody touched it
                client.set_flow_run_state(extract.id, Completed(), force=True)

        context = copy_context()
        threading.Thread(target=context.run, args=[extract_ends_when_train_is_cancelled]).start()

    host.outcomes["vocab"] = [at_work("vocab")]
    host.outcomes["extract"] = [at_work("extract")]
    host.outcomes["train"] = [vocab_fails]
    state = pipeline(tiny_config, return_state=True)
    assert state.is_failed()
    assert state.message.endswith("vocab is Failed: DraftworksError: no room")
    assert "evaluate" not in host.started
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(works["extract"].id).state.is_completed()


def test_a_person_can_approve_the_plan_before_the_work(
    host: Host, tiny_config: PipelineConfig, ear: Any
) -> None:
    context = copy_context()
    ended: list[State[Any]] = []
    run = threading.Thread(
        target=context.run,
        args=[lambda: ended.append(pipeline(tiny_config, approve=True, return_state=True))],
    )
    run.start()
    ear.wait_for("Pausing flow")
    assert host.started == ["check"]
    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    with get_client(sync_client=True) as client:
        waiting = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
        while not waiting:
            waiting = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
        client.request("POST", "/flow_runs/{id}/resume", path_params={"id": waiting[0].id})
    run.join(60)
    assert ended[0].is_completed()
    assert host.started[-1] == "report"
