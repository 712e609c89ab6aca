"""Freed memory stays in the process."""

import subprocess
import sys

FAULTS = """
import resource, sys
from draftworks.training.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(32 << 20)
before = faults()
for _ in range(10):
    bytearray(32 << 20)
print(faults() - before)
"""


def test_a_buffer_taken_again_needs_no_new_pages() -> None:
    def count(way: str) -> int:
        command = [sys.executable, "-c", FAULTS, way]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 10 * (32 << 20) // 4096
    assert count("given back") > pages // 2
    assert count("kept") < pages // 100
