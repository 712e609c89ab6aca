"""What a host must have room for: bytes on its disk, a port, the target's weights in memory."""

import os
import shutil
import socket
from pathlib import Path

from draftworks.errors import DraftworksError
from draftworks.stages.base import Stage, size

CHUNK = 64 << 20


def room(stage: Stage) -> str:
    """What the stage will write, and what the stages before it still will, against what is free.

    Raises DraftworksError when it does not fit.
    """
    own = max(0, stage.plan().bytes - written(stage.directory))
    others = sum(
        max(0, item.plan().bytes - written(item.directory))
        for item in upstream(stage)
        if not item.verify(share=0).complete
    )
    stage.workspace.require_writable()
    free = shutil.disk_usage(stage.workspace.root).free
    still = f" and the stages before it still {size(others)}" if others else ""
    if own + others > free:
        raise DraftworksError(
            f"{stage.name} will write {size(own)}{still}, but {stage.workspace.root} has "
            f"{size(free)} free. Free {size(own + others - free)} or more."
        )
    return f"will write {size(own)}{still}; {size(free)} free"


def written(directory: Path) -> int:
    """Bytes of all files under a directory; 0 when there is none."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
    return total


def port_free(port: int) -> str:
    """Raises DraftworksError when something listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DraftworksError(
                f"port {port} of 127.0.0.1 is taken ({error.strerror}). End what listens there, or "
                "set another one in extract.server.port."
            ) from None
    return f"{port} is free"


def read_ahead(files: list[Path]) -> str:
    """Read weights into the page cache, so that the engine that loads them next finds them there.

    Left out when they would take more than half of the memory that is available: the running
    stage needs its own.
    """
    total = sum(file.stat().st_size for file in files)
    available = _available_memory()
    if total > available // 2:
        return f"left out: {size(total)} of weights, {size(available)} of memory available"
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.read(descriptor, CHUNK):
                pass
        finally:
            os.close(descriptor)
    return f"{size(total)} in the page cache"


def _available_memory() -> int:
    """Bytes that can be used without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def upstream(stage: Stage) -> set[Stage]:
    """All stages that this one rests on."""
    direct = {stage.of(cls) for cls in stage.inputs}
    return direct.union(*(upstream(item) for item in direct))
