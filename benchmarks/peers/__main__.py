"""Train the same drafter on the same samples with Draftworks, speculators and SpecForge.

All start from the same weights, see the same samples in the same optimizer steps and use AdamW in
float32 with the same learning rates, so what differs is how the step is computed. Accuracy is
measured here for all three, by this project's definition, on the same held-out conversations.
What had to be changed in a package for a CPU stands at the top of its script.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks import show
from benchmarks.train import peak
from draftworks.config import PipelineConfig, recipe
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.formats import layer_config
from draftworks.progress import Progress
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.training.loop import Data, Trainer
from draftworks.training.optimizer import learning_rate
from draftworks.training.packing import epoch_packs, load_pack
from draftworks.workspace import Workspace

TORCH = f"torch=={torch.__version__.partition('+')[0]}"
# pip's commands for each environment. The vision and audio packages are built for GPUs and break
# transformers beside a CPU build of torch. SpecForge pins an inference server that training on
# stored states does not need: it is installed without what it asks for, the rest is named here.
PEERS = {
    "speculators": [
        ["install", TORCH, "speculators==0.9.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio"],
    ],
    "specforge": [
        ["install", TORCH, "transformers==5.8.1", "datasets", "accelerate", "pydantic", "psutil"],
        ["install", "--no-deps", "specforge==0.2.0", "yunchang"],
    ],
}
SCRIPTS = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, default=Path(".draftworks/peers"))
    parser.add_argument("--environments", type=Path, default=Path("~/.cache/draftworks/peers"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--pack", type=int, default=2048, help="tokens per optimizer step")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--only", nargs="*", default=["draftworks", *PEERS])
    options = parser.parse_args()
    config = configured(options)
    trainer, folder = prepare(config, options.steps)
    reports = {}
    for name in options.only:
        python = Path(sys.executable) if name == "draftworks" else environment(name, options)
        command = [python, SCRIPTS / f"train_{name}.py", folder]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
        reports[name] = json.loads((folder / f"{name}.json").read_text())
        trainer.drafter.load_state_dict(load_file(folder / f"{name}.safetensors"))
        validation = trainer.validate()
        reports[name]["accuracy"] = validation.accuracy
        reports[name]["length"] = validation.acceptance.length
    table(reports, options)


def configured(options: argparse.Namespace) -> PipelineConfig:
    """The demo's recipe with the sizes asked for."""
    values = recipe("smollm2-demo").model_dump()
    values["workspace"] = str(options.workspace)
    values["prompts"]["limit"] = options.prompts
    values["vocab"]["size"] = options.vocabulary
    values["train"] |= {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "pack_tokens": options.pack,
    }
    return PipelineConfig.model_validate(values)


def prepare(config: PipelineConfig, steps: int) -> tuple[Trainer, Path]:
    """Make the samples and states that are missing, and write the folder of the comparison.
    Returns what validates a drafter, and the folder."""
    workspace = Workspace(Path(config.workspace))
    train = Train(config, workspace)
    for stage in (Generate, Vocab, Extract):
        train.of(stage).run(Progress())
    training, validation = train.split()
    vocabulary = train.of(Vocab).vocabulary()
    states = train.of(Extract).store
    chosen = config.train
    embeddings, head = train.target.embeddings(), train.target.head()
    drafter = Drafter(train.shape, embeddings.to(torch.bfloat16))
    drafter.initialize(head[vocabulary.used], train.target.norm(), chosen.seed)
    packs = [
        pack
        for epoch in range(steps)
        for pack in epoch_packs(training, chosen.pack_tokens, chosen.seed, epoch)
    ][:steps]
    folder = Path(config.workspace) / "comparison"
    folder.mkdir(parents=True, exist_ok=True)
    for number, entries in enumerate(packs):
        pack = load_pack(states, entries, train.target.stop_ids)
        tensors = {key: getattr(pack, key) for key in ("tokens", "aux", "last", "argmax", "counts")}
        lengths = torch.tensor(pack.lengths)
        save_file(tensors | {"lengths": lengths}, folder / f"step-{number}.safetensors")
    target = {
        "embeddings": embeddings.to(torch.bfloat16, copy=True),
        "head": head.to(torch.bfloat16, copy=True),
        "t2d": vocabulary.t2d,
        "d2t": vocabulary.d2t,
    }
    save_file(target, folder / "target.safetensors")
    save_file(drafter.state_dict(), folder / "start.safetensors")
    settings: dict[str, Any] = {
        "steps": steps,
        "draft_steps": chosen.ttt_steps,
        "step_decay": chosen.step_decay,
        "pack_tokens": chosen.pack_tokens,
        "rates": [learning_rate(chosen, step, steps) for step in range(1, steps + 1)],
        "beta2": chosen.beta2,
        "clip_norm": chosen.clip_norm,
        "shape": asdict(train.shape),
        "layer": layer_config(train.shape),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    data = Data(states, training, validation, train.target.stop_ids)
    rows = head[vocabulary.used].to(torch.bfloat16)
    return Trainer(chosen, drafter, rows, vocabulary, data, folder), folder


def environment(name: str, options: argparse.Namespace) -> Path:
    """The Python of a peer's own environment, made on first use."""
    folder = options.environments.expanduser() / name
    python = folder / "bin" / "python"
    if not (folder / "installed").is_file():
        venv.create(folder, with_pip=True, clear=True)
        for arguments in PEERS[name]:
            subprocess.run([python, "-m", "pip", *arguments, "--quiet"], check=True)
        (folder / "installed").touch()
    return python


def table(reports: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    show(
        f"{options.steps} optimizer steps of {options.pack:,} tokens, draft vocabulary "
        f"{options.vocabulary:,}",
        ["", *reports],
        [
            ["tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in reports.values())],
            ["first step, s", *(f"{row['first_step_seconds']:.1f}" for row in reports.values())],
            ["all steps, s", *(f"{row['total_seconds']:.0f}" for row in reports.values())],
            ["peak memory, GB", *(f"{row['peak_gigabytes']:.2f}" for row in reports.values())],
            *(
                [
                    f"accuracy, position {k + 1}",
                    *(f"{r['accuracy'][k]:.3f}" for r in reports.values()),
                ]
                for k in range(len(next(iter(reports.values()))["accuracy"]))
            ),
            ["acceptance length", *(f"{row['length']:.3f}" for row in reports.values())],
        ],
    )
    print(f"bf16 product {peak():.2f} TFLOP/s")


if __name__ == "__main__":
    main()
