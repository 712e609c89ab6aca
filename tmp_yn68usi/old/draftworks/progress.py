"""What a stage tells about itself while it runs, and how it learns that it should end."""

from draftworks.errors import StopRequested


class Progress:
    """Counts committed units. This one keeps silent; a supervised job writes it to its status.

    A unit is counted only after it lies on disk, so progress is never more than what a restart
    would find. Training counts its steps as they are taken: those since the newest checkpoint are
    taken again after a kill.
    """

    def __init__(self) -> None:
        self.phase_name = "starting"
        self.phase_done = 0
        self.phase_total = 0
        self.section = 0  # how often a phase or a count was begun
        self.unit = ""
        self.done = 0
        self.total = 0
        self.stop_requested = False

    def phase(self, name: str, total: int = 0) -> None:
        """Name what is going on now, such as "loading weights", and how many steps it has when
        it has a count of its own."""
        self.section += 1
        self.phase_name, self.phase_done, self.phase_total = name, 0, total

    def step(self, steps: int = 1) -> None:
        """Count steps of this phase. They describe the process; nothing is committed."""
        self.phase_done += steps

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        """Announce the work: `done` of `total` units exist already."""
        self.section += 1
        self.total, self.unit, self.done = total, unit, done

    def advance(self, units: int = 1) -> None:
        """Count committed units."""
        self.done += units

    def check_stop(self) -> None:
        """Call between units. Raises StopRequested when the job was asked to end."""
        if self.stop_requested:
            raise StopRequested
