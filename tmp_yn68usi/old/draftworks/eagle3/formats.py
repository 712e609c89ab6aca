"""The checkpoint forms that engines load, written and read back.

eagle (SGLang): prefix ``midlayer.``, `eagle_config` with SGLang's layer ids (canonical - 1).
speculators (vLLM): prefix ``layers.0.``, canonical layer ids, explicit norm flags.
Both: bfloat16, `d2t` and `t2d`, no embeddings (the engines then share the target's).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.eagle3.drafter import Drafter, DrafterShape
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.errors import DraftworksError

Format = Literal["eagle", "speculators"]
PREFIX: dict[str, str] = {"eagle": "midlayer.", "speculators": "layers.0."}


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as it lies on disk. weights: by the drafter's own parameter names;
    layers: canonical ids of the auxiliary states, None where the config names none."""

    shape: DrafterShape
    weights: dict[str, Tensor]
    vocabulary: DraftVocabulary
    layers: tuple[int, int, int] | None


@dataclass(frozen=True)
class TargetFacts:
    """What an export says about its target."""

    name: str
    architectures: list[str]
    layers: tuple[int, int, int]
    draft_tokens: int


def write_checkpoint(
    folder: Path,
    form: Format,
    drafter: Drafter,
    vocabulary: DraftVocabulary,
    target: TargetFacts,
    notes: dict[str, Any],
) -> None:
    """Write `folder`/config.json, model.safetensors and draftworks.json (provenance)."""
    tensors = {
        _outside(name, form): tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = eagle_config if form == "eagle" else speculators_config
    _write_json(folder / "config.json", config(drafter.shape, target))
    _write_json(folder / "draftworks.json", notes)


def eagle_config(shape: DrafterShape, target: TargetFacts) -> dict[str, Any]:
    """config.json of the EAGLE form. SGLang counts layers from 0, so its ids are one lower."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        **_norm_flags(shape),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in target.layers],
            "use_aux_hidden_state": True,
        },
    }


def speculators_config(shape: DrafterShape, target: TargetFacts) -> dict[str, Any]:
    """config.json of the speculators form."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(target.layers),
        **_norm_flags(shape),
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(shape),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": target.draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": target.architectures},
        },
    }


def _norm_flags(shape: DrafterShape) -> dict[str, bool]:
    """Always written: absent, one reader takes a flag for true and another for false. Both engines
    read them at the top level, `norm_before_fc` (one norm over all three states) as well."""
    return {
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
    }


def layer_config(shape: DrafterShape) -> dict[str, Any]:
    """The layer in Llama's terms."""
    scaling = {key: value for key, value in shape.rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.target_vocab_size,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        # transformers 5 reads the first, transformers 4 and SGLang the other two.
        "rope_parameters": shape.rope,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
    }


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a drafter of either form. Raises DraftworksError naming what is missing or wrong."""
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise DraftworksError(f"drafter {folder} cannot be read: {error}") from None
    try:
        return _checkpoint(config, tensors)
    except KeyError as error:
        raise DraftworksError(f"drafter {folder}: no {error} in its config.json") from None
    except DraftworksError as error:
        raise DraftworksError(f"drafter {folder}: {error}") from None


def _checkpoint(config: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    form: Format = "speculators" if "speculators_model_type" in config else "eagle"
    if config.get("norm_before_fc"):
        raise DraftworksError(
            "its norm_before_fc is true: one norm over the three auxiliary states together, which "
            "this version cannot read (fc_norm, one for each, it can)"
        )
    if missing := {"d2t", "t2d"} - tensors.keys():
        raise DraftworksError(f"no {', '.join(sorted(missing))} in its weights")
    vocabulary = DraftVocabulary.from_offsets(tensors.pop("d2t"), tensors.pop("t2d"))
    tensors.pop("embed_tokens.weight", None)
    shape = _shape(config, form, len(vocabulary))
    weights = {_inside(name, form): tensor for name, tensor in tensors.items()}
    _require_shapes(shape, weights)
    return Checkpoint(shape, weights, vocabulary, _layers(config, form))


def _shape(config: dict[str, Any], form: Format, draft_vocab_size: int) -> DrafterShape:
    layer = config["transformer_layer_config"] if form == "speculators" else config
    heads = layer["num_attention_heads"]
    return DrafterShape(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        heads=heads,
        kv_heads=layer.get("num_key_value_heads", heads),
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        draft_vocab_size=draft_vocab_size,
        target_vocab_size=layer["vocab_size"],
        norm_eps=layer["rms_norm_eps"],
        max_position_embeddings=layer["max_position_embeddings"],
        rope=rope_of(layer),
        norm_before_residual=_norm_before_residual(config, form),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding of a model's config: `rope_parameters` of transformers 5, or
    `rope_theta` and `rope_scaling` of transformers 4."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        **scaling,
        "rope_type": scaling.get("rope_type") or scaling.get("type", "default"),
        "rope_theta": scaling.get("rope_theta") or config.get("rope_theta", 10_000.0),
    }


def _norm_before_residual(config: dict[str, Any], form: Format) -> bool:
    """Absent means false in the EAGLE form; in the other, readers disagree, so it must be there."""
    if form == "speculators" and "norm_before_residual" not in config:
        raise DraftworksError(
            "its config.json does not say norm_before_residual, which one reader takes for true "
            "and another for false; write what it was trained with"
        )
    return bool(config.get("norm_before_residual", False))


def _layers(config: dict[str, Any], form: Format) -> tuple[int, int, int] | None:
    if form == "speculators":
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        shift = 0
    else:
        ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        shift = 1
    if not ids:
        return None
    if len(ids) != 3:
        raise DraftworksError(
            f"its config lists {len(ids)} auxiliary layers {ids}; EAGLE-3 takes three "
            "(the last state is not one of them)"
        )
    return (ids[0] + shift, ids[1] + shift, ids[2] + shift)


def _require_shapes(shape: DrafterShape, weights: dict[str, Tensor]) -> None:
    """Engines skip unknown names silently, so names and shapes are held against the drafter's."""
    with torch.device("meta"):
        expected = Drafter(shape, torch.empty(0)).state_dict()
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or unknown:
        raise DraftworksError(f"missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise DraftworksError(
                f"{name} is {list(weights[name].shape)}, its config says {list(tensor.shape)}"
            )


def _outside(name: str, form: Format) -> str:
    return PREFIX[form] + name.removeprefix("layer.") if name.startswith("layer.") else name


def _inside(name: str, form: Format) -> str:
    prefix = PREFIX[form]
    return "layer." + name.removeprefix(prefix) if name.startswith(prefix) else name


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
