"""A tiny target with a real tokenizer, a pipeline around it that runs in seconds, a full disk."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads cost more than they give at this size, and much more beside other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftworks.config import PipelineConfig
from draftworks.progress import Progress
from draftworks.stages import STAGES
from draftworks.target import Target
from draftworks.workspace import Workspace

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320
STOPS = [1, 149, 196, 245]
"""<|im_end|>, and three that this target likes, so that half of its answers end by themselves."""


@pytest.fixture(scope="session")
def prompt_texts() -> list[str]:
    """The shipped prompts, short ones first."""
    source = resources.files("draftworks") / "data" / "prompts.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    return sorted((row["prompt"] for row in rows if "prompt" in row), key=len)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, prompt_texts: list[str]) -> Target:
    """A random Llama of 8 layers with a byte-level BPE tokenizer and a ChatML template, in
    Hugging Face form. Its wide initial weights keep greedy answers from repeating themselves."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tokenizer = chat_tokenizer(prompt_texts)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=STOPS,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    return Target(str(folder), folder)


@pytest.fixture(scope="session")
def make_config(tiny_target: Target, prompt_texts: list[str]) -> Callable[..., PipelineConfig]:
    """A config of a pipeline in a folder: 24 prompts, answered with at most 24 tokens each.
    Keywords change settings, a dictionary for each section."""

    def make(folder: Path, **changes: Any) -> PipelineConfig:
        path = folder / "prompts.jsonl"
        lines = [json.dumps(text) + "\n" for text in prompt_texts[:24]]
        path.write_text("".join(lines), encoding="utf-8")
        sections = {
            "target": {"model": str(tiny_target.folder)},
            "prompts": {"path": str(path)},
            "generate": {"max_new_tokens": 24, "keep_truncated": True, "part_size": 8},
            "vocab": {"size": 128},
            "train": {
                "epochs": 2,
                "pack_tokens": 256,
                "learning_rate": 0.001,
                "validation_share": 0.25,
                "checkpoint_every": 4,
                "validate_every": 8,
            },
            # A handful of prompts and a drafter that has hardly learnt: the two measures of its
            # acceptance scatter far more than those of a real run.
            "evaluate": {"prompts": 6, "max_new_tokens": 24, "batch": 4, "tolerance": 0.9},
        }
        merged = {name: values | changes.pop(name, {}) for name, values in sections.items()}
        rest = {"name": "tiny", "workspace": str(folder / "workspace")} | changes
        return PipelineConfig.model_validate(rest | merged)

    return make


@pytest.fixture
def tiny_config(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> PipelineConfig:
    """A pipeline that runs in seconds, with its workspace in tmp_path / "workspace"."""
    return make_config(tmp_path)


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., PipelineConfig]
) -> PipelineConfig:
    """Never to be changed."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    for stage in STAGES.values():
        stage(config, Workspace(Path(config.workspace))).run(Progress())
    return config


@pytest.fixture
def finished(finished_once: PipelineConfig, tiny_config: PipelineConfig) -> PipelineConfig:
    """A finished pipeline to spoil."""
    shutil.copytree(finished_once.workspace, tiny_config.workspace)
    return tiny_config


def chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:50], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
