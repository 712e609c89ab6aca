"""Brings a Prefect server to the declared state: pools, recipes, blocks, deployments.

Running it again changes nothing. Needs PREFECT_API_URL.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Crashed
from prefect.variables import Variable

from blocks import BLOCKS
from deployments import DEMO, POOLS, ROOT
from draftworks.config import load, recipes
from draftworks.errors import DraftworksError


def bootstrap(workspace: Path, demo: str = DEMO) -> None:
    """Create or update everything.

    workspace: absolute path on the host, put into every recipe. demo: recipe or config file that
    the deployment `smollm2-demo` and the stages alone take. Raises DraftworksError with Prefect's
    own words when the deployment fails.
    """
    with get_client(sync_client=True) as client:
        for name, description in POOLS.items():
            pool = WorkPoolCreate(name=name, type="process", description=description)
            try:
                client.create_work_pool(pool)
            except ObjectAlreadyExists:
                continue
    for block in BLOCKS:
        block.register_type_and_schema()
    for name in recipes():
        config = load(demo if name == DEMO else name)
        placed = config.model_copy(update={"workspace": str(workspace)})
        variable = "recipe_" + name.replace("-", "_").replace(".", "_")
        # Defaults are left out: the form shows them anyway, and a variable has 5,000 characters.
        Variable.set(
            variable, placed.model_dump(mode="json", exclude_defaults=True), overwrite=True
        )
    deploy()


def deploy() -> None:
    """`prefect deploy` of deployments/prefect.yaml."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        [*command, "--prefect-file", "deployments/prefect.yaml"],
        cwd=ROOT,
        env={**os.environ, "DRAFTWORKS_ROOT": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise DraftworksError(f"prefect deploy failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def close_orphans() -> None:
    """Mark runs in progress as crashed. Only for a server whose workers are known to be gone:
    nothing else would ever end those runs."""
    state = FlowRunFilterState(
        type=FlowRunFilterStateType(
            any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
        )
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state)):
            client.set_flow_run_state(run.id, Crashed(message="its worker is gone"), force=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace")
    parser.add_argument("--demo", default=DEMO, help="recipe or file for the demo's deployments")
    parser.add_argument("--no-worker-lives", action="store_true", help="mark open runs as crashed")
    options = parser.parse_args()
    try:
        if options.no_worker_lives:
            close_orphans()
        bootstrap(options.workspace.expanduser().absolute(), options.demo)
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("pools, recipes and deployments are in place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
