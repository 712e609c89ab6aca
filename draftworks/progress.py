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
        self.unit = ""
        self.done = 0
        self.total = 0
        self.stop_requested = False

    def phase(self, name: str) -> None:
        """Name what is going on now, such as "loading target"."""
        self.phase_name = name

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        """Announce the work: `done` of `total` units exist already."""
        self.total, self.unit, self.done = total, unit, done

    def advance(self, units: int = 1) -> None:
        """Count committed units."""
        self.done += units

    def check_stop(self) -> None:
        """Call between units. Raises StopRequested when the job was asked to end."""
        if self.stop_requested:
            raise StopRequested
