"""Trains the toy language in the folder it is given and stands still at step HOLD, so that
whoever started it has something to kill."""

import signal
import sys
from pathlib import Path

import toys

from draftworks.progress import Progress

HOLD = 19


class Holding(Progress):
    def advance(self, units: int = 1) -> None:
        super().advance(units)
        if self.done == HOLD:
            signal.pause()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    data = toys.cycle_data(folder / "states")
    toys.cycle_trainer(folder / "run", data, toys.cycle_config()).run(Holding())
