"""Arrows run down only: what each floor of the house may import, read from its source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORCHESTRATION = {"flows", "tasks", "blocks", "deployments"}
STAGES_AND_ABOVE = {
    "draftworks.stages",
    "draftworks.supervision",
    "draftworks.preparation",
    "draftworks.report",
}
MACHINERY = {
    "draftworks.engines",
    "draftworks.hidden_states",
    "draftworks.eagle3",
    "draftworks.training",
}
FORBIDDEN = {
    "flows": {"deployments"},
    "tasks": {"flows", "deployments"},
    "blocks": {"flows", "tasks", "deployments"},
    "draftworks": {"prefect", *ORCHESTRATION},
    "draftworks/stages": {"draftworks.supervision", "draftworks.preparation", "draftworks.report"},
    "draftworks/preparation": {"draftworks.report"},
    "draftworks/engines": STAGES_AND_ABOVE,
    "draftworks/hidden_states": STAGES_AND_ABOVE,
    "draftworks/eagle3": STAGES_AND_ABOVE,
    "draftworks/training": STAGES_AND_ABOVE,
    "draftworks/records": STAGES_AND_ABOVE | MACHINERY,
    "draftworks/workspace.py": STAGES_AND_ABOVE | MACHINERY,
    "draftworks/config.py": STAGES_AND_ABOVE | MACHINERY,
}


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imports(source: Path) -> set[str]:
    """Full names of everything that a file imports, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                names |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.ImportFrom():
                pytest.fail(f"{source}: relative import")
    return names


def under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize(("place", "forbidden"), FORBIDDEN.items(), ids=list(FORBIDDEN))
def test_nothing_imports_what_stands_above_it(place: str, forbidden: set[str]) -> None:
    files = sources(place)
    assert files, f"{place} is empty: this test looks in the wrong folder"
    found = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if any(under(name, module) for module in forbidden)
    }
    assert found == set()


def test_the_store_of_hidden_states_runs_inside_engine_processes() -> None:
    """Through everything that it imports of ours: torch, safetensors, the standard library."""
    seen: set[Path] = set()
    foreign: set[str] = set()
    todo = [ROOT / "draftworks" / "hidden_states" / "store.py"]
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        for name in imports(source):
            if under(name, "draftworks"):
                module = ROOT.joinpath(*name.split("."))
                candidates = (module.with_suffix(".py"), module.parent.with_suffix(".py"))
                todo += [file for file in candidates if file.is_file()]
            else:
                foreign.add(name.split(".")[0])
    assert len(seen) > 2
    assert foreign - {"torch", "safetensors"} <= sys.stdlib_module_names
