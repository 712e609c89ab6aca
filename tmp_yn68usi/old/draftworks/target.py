"""The target model: a folder in Hugging Face form, wherever it comes from.

Only what drafting needs is read: `config.json`, the tokenizer, and the three tensors a drafter
takes from its target, looked up in the safetensors index so that the rest of the weights
(547 GB for Kimi-K2.5) stays unread.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from draftworks import bundled
from draftworks.config import TargetConfig
from draftworks.errors import DraftworksError
from draftworks.workspace import digest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "norm.weight"


@dataclass(frozen=True)
class Target:
    """A resolved target: `folder` holds config.json, tokenizer files and safetensors weights."""

    name: str
    folder: Path
    trust_remote_code: bool = False

    @classmethod
    def resolve(cls, config: TargetConfig) -> "Target":
        """Find the target's folder: a bundled name, a local folder, or a hub id (downloaded).

        Raises DraftworksError when it is none of these or lacks a needed file.
        """
        if config.model == bundled.NAME:
            folder = bundled.folder()
        elif config.model and Path(config.model).expanduser().is_dir():
            folder = Path(config.model).expanduser().absolute()
        else:
            folder = _from_hub(config)
        target = cls(config.model, folder, config.trust_remote_code)
        target.require_complete()
        return target

    def require_complete(self) -> None:
        """Raises DraftworksError naming the first missing file."""
        if not (self.folder / "config.json").is_file():
            raise DraftworksError(f"target {self.folder}: no config.json; not a model folder")
        tokenizer_files = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
        if not any((self.folder / name).is_file() for name in tokenizer_files):
            raise DraftworksError(
                f"target {self.folder}: no tokenizer (looked for {', '.join(tokenizer_files)}). "
                "Copy the tokenizer files of the model beside its config.json."
            )
        if not self.weight_files:
            raise DraftworksError(f"target {self.folder}: no *.safetensors weights")

    def require_all_weights(self) -> None:
        """Raises DraftworksError unless every weight file is there, as running the target needs
        it; drafting alone reads three tensors."""
        missing = {path.name for path in self.weight_files.values() if not path.is_file()}
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DraftworksError(
                f"target {self.folder}: {', '.join(sorted(missing)[:3])}{more} of its weights "
                "missing; download them"
            )

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """config.json of the language model itself (inside `text_config` when multimodal)."""
        config = _json(self.folder / "config.json")
        text: dict[str, Any] = config.get("text_config", config)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if not isinstance(text.get(name), int):
                raise DraftworksError(f"target {self.folder}: config.json has no number {name}")
        return text

    @property
    def hidden_size(self) -> int:
        return int(self.text_config["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.text_config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.text_config["vocab_size"])

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        return int(self.text_config.get("max_position_embeddings", 2**31))

    @property
    def norm_eps(self) -> float:
        return float(self.text_config.get("rms_norm_eps", 1e-6))

    @property
    def architectures(self) -> list[str]:
        return list(_json(self.folder / "config.json").get("architectures", []))

    def auxiliary_layers(self, wanted: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Canonical ids of the three auxiliary states: k = the state after k layers.

        The default 2, n//2, n-3 is the one vLLM and SGLang share for an n-layer target.
        """
        n = self.layers
        ids = wanted or (2, n // 2, n - 3)
        if not (0 < ids[0] < ids[1] < ids[2] < n):
            raise DraftworksError(
                f"extract.layers {list(ids)}: a target of {n} layers needs three rising ids "
                f"between 1 and {n - 1} (k = the state after k layers)"
            )
        return ids

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:
            raise DraftworksError(
                f"target {self.folder}: the tokenizer cannot be loaded "
                f"({type(error).__name__}: {error})"
            ) from error
        if not tokenizer.chat_template:
            raise DraftworksError(
                f"target {self.folder}: the tokenizer has no chat template; a base model "
                "cannot answer prompts. Use the instruction-tuned model."
            )
        return tokenizer

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the answer begins, by the chat template."""
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return cast("list[int]", ids)

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless asked for."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return cast("str", text)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer: generation_config.json, config.json, tokenizer."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                eos = _json(path).get("eos_token_id")
                found.update([eos] if isinstance(eos, int) else eos or [])
        if self.tokenizer.eos_token_id is not None:
            found.add(int(self.tokenizer.eos_token_id))
        return frozenset(found)

    @cached_property
    def weight_files(self) -> dict[str, Path]:
        """Tensor name -> the safetensors file that holds it; from the index or the headers."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = _json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise DraftworksError(f"target {index}: no weight_map; download it again")
            return {name: self.folder / file for name, file in weight_map.items()}
        return {
            name: path
            for path in sorted(self.folder.glob("*.safetensors"))
            for name in _header(path)
            if name != "__metadata__"
        }

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what the target is, in milliseconds at any size.

        Covers config and tokenizer by content and every weight file by name, size, header and
        blocks spread over it: after a fine-tuning only the values differ.
        """
        texts = {
            path.name: path.read_text(errors="replace")
            for pattern in ("*.json", "*.jinja")
            for path in sorted(self.folder.glob(pattern))
        }
        weights = [
            (path.name, path.stat().st_size, digest(_header(path)), _sampled(path))
            for path in sorted(set(self.weight_files.values()))
            if path.is_file()
        ]
        return digest([texts, weights])

    def embeddings(self) -> "Tensor":
        """Input embeddings [V, H] in the stored dtype."""
        return self._read(self._name_ending(EMBEDDINGS))

    def head(self) -> "Tensor":
        """LM head [V, H]; the embeddings where the target ties them."""
        tied = self.text_config.get("tie_word_embeddings", False)
        names = [name for name in self.weight_files if name.endswith(HEAD)]
        return self.embeddings() if tied or not names else self._read(self._name_ending(HEAD))

    def norm(self) -> "Tensor":
        """Weight of the final norm [H]."""
        return self._read(self._name_ending(EMBEDDINGS).removesuffix(EMBEDDINGS) + NORM)

    def _name_ending(self, suffix: str) -> str:
        names = [
            name
            for name in self.weight_files
            if name.endswith(suffix) and "vision" not in name and "audio" not in name
        ]
        if len(names) != 1:
            raise DraftworksError(
                f"target {self.folder}: expected exactly one tensor ending in {suffix}, "
                f"found {names or 'none'}"
            )
        return names[0]

    def _read(self, name: str) -> "Tensor":
        if name not in self.weight_files:
            raise DraftworksError(f"target {self.folder}: no tensor {name} in its weights")
        path = self.weight_files[name]
        if not path.is_file():
            raise DraftworksError(
                f"target {self.folder}: {path.name} holds {name} but is missing; "
                "download that shard"
            )
        try:
            with safe_open(path, framework="pt") as weights:
                return cast("Tensor", weights.get_tensor(name))
        except SafetensorError as error:
            raise DraftworksError(
                f"target {self.folder}: {path.name} is damaged ({error}); download it again"
            ) from None


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DraftworksError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftworksError(f"target {path}: not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise DraftworksError(f"target {path}: not a JSON object; download it again")
    return value


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: an 8-byte little-endian length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (OSError, ValueError, struct.error) as error:
        raise DraftworksError(
            f"target {path}: no safetensors file ({error}); download it again"
        ) from None
    return header


def _sampled(path: Path) -> str:
    """SHA-256 over 16 blocks of 4 kB, evenly spread over a file."""
    found = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for block in range(16):
            file.seek(size * block // 16)
            found.update(file.read(4096))
    return found.hexdigest()


def _from_hub(config: TargetConfig) -> Path:
    from huggingface_hub import snapshot_download

    if config.model.startswith((".", "/", "~")) or config.model.count("/") != 1:
        raise DraftworksError(
            f"target {config.model!r}: no such folder. Give a folder in Hugging Face form, a hub "
            f"id such as organisation/name, or {bundled.NAME!r}"
        )
    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.py", "*.txt"],
            )
        )
    except Exception as error:
        raise DraftworksError(
            f"target {config.model!r}: not a folder, and the hub did not give it "
            f"({type(error).__name__}). Check the name and the network, or point to a folder."
        ) from error
