"""The environment that a job runs in: versions of what its result may depend on."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

import draftworks
from draftworks.errors import DraftworksError
from draftworks.workspace import digest, file_digest

PACKAGES = ("numpy", "pyarrow", "safetensors", "tokenizers", "torch", "transformers")


def environment() -> dict[str, str]:
    """Name -> version of this very process: Python, Draftworks (by the digest of its source), and
    the packages that compute. Imports none of them, so it takes milliseconds."""
    return {
        "python": platform.python_version(),
        "draftworks": source_version(),
        **{name: _version(name) or "absent" for name in PACKAGES},
    }


def environment_of(python: str) -> dict[str, str]:
    """The environment of another interpreter; of this one where `python` is empty. Raises
    DraftworksError when it cannot tell."""
    if not python:
        return environment()
    command = f"import json; from {__name__} import environment; print(json.dumps(environment()))"
    try:
        done = subprocess.run([python, "-c", command], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DraftworksError(f"jobs.python {python} cannot be run: {error}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:]
        raise DraftworksError(f"jobs.python {python} does not know itself: {''.join(words)}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def source_version() -> str:
    """Version of Draftworks with the digest of its source, as a local version label."""
    source = Path(draftworks.__file__).parent
    files = sorted(source.rglob("*.py"))
    revision = digest([(str(file.relative_to(source)), file_digest(file)) for file in files])
    return f"{draftworks.__version__}+{revision}"


def require(versions: dict[str, str]) -> str:
    """What was found. Raises DraftworksError naming every package outside its range.

    versions: package -> range in the form of PEP 440, such as ">=2.10,<3".
    """
    found = environment()
    wrong = []
    for name, text in versions.items():
        try:
            wanted = SpecifierSet(text)
        except InvalidSpecifier:
            raise DraftworksError(f"jobs.requires: {name} {text!r} is no version range") from None
        here = found.get(name) or _version(name)
        if here is None or here == "absent":
            wrong.append(f"{name} is not installed, {text} is required")
        elif not wanted.contains(here, prereleases=True):
            wrong.append(f"{name} is {here}, {text} is required")
    if wrong:
        raise DraftworksError(
            f"{'; '.join(wrong)}. Install it there, or name another interpreter in `jobs.python`."
        )
    named = ("python", "draftworks", "torch", "transformers")
    return ", ".join(f"{name} {found[name]}" for name in named)


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What differs between two environments, one phrase each."""
    return [
        f"{name} was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
