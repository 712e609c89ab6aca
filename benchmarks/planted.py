"""How early a fault of the next stage is told: planted while extraction runs, found by preparing.

The demo's extraction runs as its job; beside it the training is prepared again and again, each time
with another fault. Without preparation each would show when extraction has ended: the time gained
is from the moment its failed check was written until then.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks import show
from deployments import ROOT
from draftworks.config import PipelineConfig, load
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.formats import TargetFacts, write_checkpoint
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.preparation.prepare import Preparation
from draftworks.progress import Progress
from draftworks.stages import stage_named
from draftworks.stages.train import Train
from draftworks.supervision.job import Job
from draftworks.workspace import Workspace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="smollm2-demo", help="recipe or config file")
    parser.add_argument("--prompts", type=int, default=400, help="use only so many prompts")
    parser.add_argument("--new-tokens", type=int, default=48, help="longest answer")
    options = parser.parse_args()
    config = load(options.recipe)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder).absolute()
        config = config.model_copy(
            update={
                "workspace": str(place / "workspace"),
                "prompts": config.prompts.model_copy(update={"limit": options.prompts}),
                "generate": config.generate.model_copy(
                    update={"max_new_tokens": options.new_tokens}
                ),
            }
        )
        workspace = Workspace(Path(config.workspace))
        stage_named("generate")(config, workspace).run(Progress())
        extraction = Job(stage_named("extract")(config, workspace).job_directory)
        start(extraction, config, ["run", "CONFIG", "extract"], {})
        found = {name: prepare(*planted) for name, planted in plants(config, place).items()}
        assert extraction.alive(), "extraction ended before the last fault was found; give it more"
        while extraction.alive():
            time.sleep(0.1)
        ended = extraction.history()[-1]["ended"]
    show(
        f"Faults of training, told while extraction runs ({options.prompts} samples)",
        ["planted", "told after, s", "before extraction ended, s"],
        [[name, f"{took:.1f}", f"{ended - told:.0f}"] for name, (took, told, _) in found.items()],
    )
    for name, (_, _, words) in found.items():
        print(f"{name}: {words}")


def plants(config: PipelineConfig, place: Path) -> dict[str, tuple[PipelineConfig, dict[str, str]]]:
    """Fault -> the config and the environment that have it."""
    old = place / "old"
    shutil.copytree(
        ROOT / "draftworks", old / "draftworks", ignore=shutil.ignore_patterns("__pycache__")
    )
    source = (old / "draftworks" / "config.py").read_text()
    source = source.replace("    optimizer: Literal", "    method: Literal")
    (old / "draftworks" / "config.py").write_text(source)
    jobs = config.jobs.model_copy(update={"requires": {"torch": ">=99"}})
    hoard = config.train.model_copy(update={"keep_checkpoints": 1_000_000})
    start = config.train.model_copy(update={"warm_start": str(other_map(config, place))})
    return {
        "unknown argument": (config, {"PYTHONPATH": str(old), "PYTHONSAFEPATH": "1"}),
        "wrong version": (config.model_copy(update={"jobs": jobs}), {}),
        "missing disk": (config.model_copy(update={"train": hoard}), {}),
        "mismatched map": (config.model_copy(update={"train": start}), {}),
    }


def other_map(config: PipelineConfig, place: Path) -> Path:
    """A drafter to start from whose two maps of the draft vocabulary name different tokens."""
    train = Train(config, Workspace(Path(config.workspace)))
    drafter = Drafter(train.shape, train.target.embeddings())
    vocabulary = DraftVocabulary(torch.arange(config.vocab.size), train.target.vocab_size)
    facts = TargetFacts(config.target.model, train.target.architectures, (2, 15, 27), 3)
    folder = place / "other"
    write_checkpoint(folder, "speculators", drafter, vocabulary, facts, {})
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + 1}, folder / "model.safetensors")
    return folder


def prepare(config: PipelineConfig, environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds until the fault was told, the moment in seconds since the epoch, and its words."""
    preparation = Preparation(stage_named("train")(config, Workspace(Path(config.workspace))))
    preparation.forget()
    started = time.time()
    start(preparation.job, config, ["prepare", "CONFIG", "train"], environment)
    while True:
        alive = preparation.job.alive()
        failed = [item.detail for item in preparation.checks() if not item.passed]
        if failed or not alive:
            told = time.time()
            preparation.job.end(grace=30)
            return told - started, told, failed[0] if failed else preparation.job.tail(1)
        time.sleep(0.05)


def start(
    job: Job, config: PipelineConfig, command: list[str], environment: dict[str, str]
) -> None:
    job.directory.mkdir(parents=True, exist_ok=True)
    settings = job.directory / "config.json"
    settings.write_text(config.model_dump_json())
    words = [str(settings) if word == "CONFIG" else word for word in command]
    place = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    job.launch_or_attach(
        [sys.executable, "-m", "draftworks", *words], {**os.environ, **place, **environment}
    )


if __name__ == "__main__":
    main()
