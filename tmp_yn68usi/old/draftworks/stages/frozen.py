"""The part that is committed now, frozen: a workspace of its own, in which the stages run as in
any other while the original grows on.

Samples are written anew, hidden states are hard links: a frozen part takes hardly any space, and
nothing that happens to the original changes it.
"""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.hidden_states.store import StateStore
from draftworks.records.manifest import ManifestWriter
from draftworks.records.samples import Sample, SampleStore, SampleWriter
from draftworks.stages.base import Stage
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.workspace import Workspace, commit_directory, commit_json

PART_SIZE = 1024


def freeze(source: Stage, root: Path, *, states: bool = True, shortest: int | None = None) -> None:
    """Make `root` a workspace that holds the committed samples of `source`'s pipeline, and with
    `states` only those whose hidden states are committed too, with them.

    shortest: keep only so many, the shortest, for a trial that should end soon. Appears complete
    or not at all. Raises DraftworksError when nothing is committed yet.
    """
    generate, extract = source.of(Generate), source.of(Extract)
    rows = {row["id"]: row for row in extract.store.rows()} if states else {}
    entries = generate.store.index()
    chosen = [entry for entry in entries if not states or entry.sample_id in rows]
    if shortest is not None:
        chosen = sorted(chosen, key=lambda entry: (entry.tokens, entry.sample_id))[:shortest]
    if not chosen:
        wanted = extract.title if states else generate.title
        raise DraftworksError(f"nothing to freeze: no {wanted} are committed yet")
    ids = {entry.sample_id for entry in chosen}
    with commit_directory(root) as folder:
        frozen = Workspace(folder)
        samples = (sample for sample in generate.store.samples(ids) if sample.id in ids)
        _write(SampleStore(frozen.artifact(generate.name, generate.identity)), samples)
        if states:
            _link(extract.store, ids, StateStore(frozen.artifact(extract.name, extract.identity)))
        commit_json(frozen.part_file, {"samples": len(ids), "of": len(entries)})


def experiment(config: PipelineConfig) -> PipelineConfig:
    """The config that stages run with: the same, or with `allow_partial` in the workspace of that
    experiment, frozen when it is first asked for and found again ever after."""
    workspace = Workspace(Path(config.workspace))
    if config.allow_partial is None or workspace.part_file.exists():
        return config
    root = workspace.root / "partial" / config.allow_partial
    if not root.is_dir():
        freeze(Generate(config, workspace), root)
    return config.model_copy(update={"workspace": str(root)})


def _write(store: SampleStore, samples: Iterable[Sample]) -> None:
    writer = SampleWriter(store)
    remaining = iter(samples)
    while part := list(islice(remaining, PART_SIZE)):
        writer.commit(part, [])
    writer.close()


def _link(source: StateStore, ids: set[str], frozen: StateStore) -> None:
    manifest = ManifestWriter(frozen.manifest)
    for row in source.rows():
        if row["id"] in ids:
            path = frozen.path(row["id"])
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source.path(row["id"]), path)
            manifest.append(row)
    manifest.close()
