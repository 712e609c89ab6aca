"""`make up` and `make down`: server and workers on this machine, to play with."""

import argparse
import sys
from pathlib import Path

from deployments import ROOT
from deployments.stack import Stack
from draftworks.errors import DraftworksError


def up(stack: Stack) -> None:
    """Start what does not run, deploy, say where it is. Raises DraftworksError."""
    stack.up()
    print(
        f"Prefect UI   {stack.url}\n"
        f"run one      PREFECT_API_URL={stack.url}/api {sys.executable} -m prefect deployment run "
        "pipeline/smollm2-demo --watch\n"
        "end it       make down"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--home", type=Path, default=ROOT / ".draftworks")
    options = parser.parse_args()
    stack = Stack(options.home)
    try:
        up(stack) if options.command == "up" else stack.down()
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
