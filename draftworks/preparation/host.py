"""What a host must have room for: bytes on its disk, a port, the target's weights in memory."""

import os
import shutil
import socket
import subprocess
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


def gpus_there(count: int, each: int) -> str:
    """Raises DraftworksError unless there are so many GPUs with so many bytes of memory each."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DraftworksError(f"{count} GPUs are needed, but nvidia-smi fails: {error}") from None
    found = [line.rsplit(",", 1) for line in told.stdout.splitlines() if line.strip()]
    memory = [(name.strip(), int(mebibytes) << 20) for name, mebibytes in found]
    fitting = [name for name, held in memory if held >= each]
    if len(fitting) < count:
        there = ", ".join(f"{name} with {size(held)}" for name, held in memory) or "none"
        raise DraftworksError(
            f"{count} GPUs with {size(each)} of memory each are needed; there are: {there}"
        )
    return f"{count} of {len(memory)} GPUs ({fitting[0]}), {size(each)} of memory needed on each"


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
