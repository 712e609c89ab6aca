"""The checkpoint forms: what engines read, what comes back, and what is refused."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.eagle3.attention import PackedAttend, whole
from draftworks.eagle3.drafter import Drafter, DrafterShape
from draftworks.eagle3.formats import Format, TargetFacts, read_checkpoint, write_checkpoint
from draftworks.errors import DraftworksError

FORMS: tuple[Format, ...] = ("eagle", "speculators")
LAYERS = (2, 30, 58)
FACTS = TargetFacts("org/target", ["TargetForCausalLM"], LAYERS, 3)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_SHAPE = toys.shape(rope=YARN, max_position_embeddings=65_536)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


def export(folder: Path, form: Format, shape: DrafterShape = toys.SHAPE) -> Drafter:
    """Write a drafter whose weights bfloat16 holds exactly. Returns it, in float64."""
    drafter = toys.drafter(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    write_checkpoint(folder, form, drafter, toys.VOCABULARY, FACTS, {"made": "by a test"})
    return drafter


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = config(folder)
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def layer_of(values: dict[str, Any]) -> dict[str, Any]:
    return values.get("transformer_layer_config", values)


@torch.no_grad()
def logits(drafter: Drafter, first_position: int = 0) -> Tensor:
    """Two steps over one document whose positions start where they are told to."""
    pack = toys.pack(toys.documents("..aaaa"))
    attend = PackedAttend(whole(pack.lengths))
    hidden = drafter.features(pack.aux)
    for step in range(2):
        positions = pack.offsets * 7 + first_position + step
        hidden = drafter(pack.tokens, hidden, positions, attend)
    return drafter.logits(hidden)


def reload(folder: Path, original: Drafter) -> Drafter:
    checkpoint = read_checkpoint(folder)
    drafter = Drafter(checkpoint.shape, original.embeddings).double()
    drafter.load_state_dict(checkpoint.weights)
    return drafter


FLAGS = ("norm_before_residual", "fc_norm", "norm_output")


@pytest.mark.parametrize("flags", itertools.product([False, True], repeat=3), ids=str)
def test_a_drafter_comes_back_as_it_was(
    form: Format, flags: tuple[bool, ...], tmp_path: Path
) -> None:
    original = export(tmp_path, form, toys.shape(**dict(zip(FLAGS, flags, strict=True))))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.shape == original.shape
    assert checkpoint.layers == LAYERS
    assert checkpoint.vocabulary.used.equal(toys.VOCABULARY.used)
    assert checkpoint.vocabulary.target_size == toys.TARGET_VOCAB
    assert logits(reload(tmp_path, original)).equal(logits(original))


def test_tensors_are_those_that_engines_load(form: Format, tmp_path: Path) -> None:
    export(tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = {"eagle": "midlayer.", "speculators": "layers.0."}[form]
    layer = {
        **{f"self_attn.{name}_proj.weight": None for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": None for name in ("gate", "up", "down")},
        "hidden_norm.weight": None,
        "input_layernorm.weight": None,
        "post_attention_layernorm.weight": None,
    }
    outside = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors.keys() == outside | {prefix + name for name in layer}
    weights = tensors.keys() - {"d2t", "t2d"}
    assert {tensors[name].dtype for name in weights} == {torch.bfloat16}
    hidden = toys.SHAPE.hidden_size
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["lm_head.weight"].shape == (len(toys.USED), hidden)
    assert tensors[prefix + "self_attn.k_proj.weight"].shape == (2 * 6, 2 * hidden)


def test_the_map_is_written_as_offsets_and_members(form: Format, tmp_path: Path) -> None:
    export(tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [used - i for i, used in enumerate(toys.USED)]
    assert tensors["t2d"].dtype == torch.bool
    assert tuple(tensors["t2d"].nonzero().squeeze(1).tolist()) == toys.USED


def test_eagle_ids_are_sglangs_which_are_one_lower(tmp_path: Path) -> None:
    export(tmp_path, "eagle")
    values = config(tmp_path)
    assert values["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
        "use_aux_hidden_state": True,
    }
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["model_type"] == "llama"


def test_speculators_ids_are_canonical(tmp_path: Path) -> None:
    export(tmp_path, "speculators")
    values = config(tmp_path)
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert values["target_hidden_size"] == toys.SHAPE.hidden_size
    assert values["speculators_model_type"] == "eagle3"
    assert "model_type" not in values
    verifier = values["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": FACTS.name, "architectures": FACTS.architectures}
    [proposal] = values["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == FACTS.draft_tokens


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_norm_flags_are_always_written(form: Format, flag: str | None, tmp_path: Path) -> None:
    """At the top level in both forms, where vLLM and SGLang look for them."""
    export(tmp_path, form, toys.shape(**({flag: True} if flag else {})))
    values = config(tmp_path)
    assert {name: values[name] for name in FLAGS} == {name: name == flag for name in FLAGS}
    assert values["norm_before_fc"] is False


def test_each_auxiliary_state_has_a_norm_of_its_own(form: Format, tmp_path: Path) -> None:
    """Named as vLLM and SGLang load them."""
    original = export(tmp_path, form, toys.shape(fc_norm=True))
    tensors = load_file(tmp_path / "model.safetensors")
    for index, norm in enumerate(original.fc_norm):
        assert tensors[f"fc_norm.{index}.weight"].double().equal(norm.weight)


def test_sizes_are_the_shapes(form: Format, tmp_path: Path) -> None:
    shape = toys.shape(max_position_embeddings=262_144)
    export(tmp_path, form, shape)
    values = config(tmp_path)
    assert values["draft_vocab_size"] == len(toys.USED)
    layer = layer_of(values)
    assert layer["max_position_embeddings"] == 262_144
    assert layer["vocab_size"] == toys.TARGET_VOCAB
    assert layer["num_hidden_layers"] == 1
    assert layer["tie_word_embeddings"] is False
    sizes = ("hidden_size", "intermediate_size", "head_dim")
    assert [layer[name] for name in sizes] == [getattr(shape, name) for name in sizes]
    assert (layer["num_attention_heads"], layer["num_key_value_heads"]) == (4, 2)


@pytest.mark.parametrize("spelling", ["transformers_5", "transformers_4", "older"])
def test_yarn_survives_in_every_spelling(form: Format, spelling: str, tmp_path: Path) -> None:
    """transformers 5 has rope_parameters; 4 and SGLang rope_theta and rope_scaling, whose type
    old configs (Kimi's too) call `type`."""

    def respell(values: dict[str, Any]) -> None:
        layer = layer_of(values)
        if spelling != "transformers_5":
            del layer["rope_parameters"]
        if spelling == "older":
            layer["rope_scaling"]["type"] = layer["rope_scaling"].pop("rope_type")

    original = export(tmp_path, form, YARN_SHAPE)
    edit_config(tmp_path, respell)
    rope = read_checkpoint(tmp_path).shape.rope
    assert {name: rope[name] for name in YARN} == YARN
    restored = reload(tmp_path, original)
    assert restored.rotary.frequencies.equal(original.rotary.frequencies)
    assert logits(restored, 50_000).equal(logits(original, 50_000))
    plain = Drafter(toys.SHAPE, original.embeddings).double()
    plain.load_state_dict(original.state_dict())
    assert not logits(plain, 50_000).allclose(logits(original, 50_000))


def test_plain_rope_is_no_scaling(form: Format, tmp_path: Path) -> None:
    export(tmp_path, form)
    layer = layer_of(config(tmp_path))
    assert layer["rope_scaling"] is None
    assert layer["rope_theta"] == toys.ROPE["rope_theta"]
    edit_config(tmp_path, lambda values: layer_of(values).pop("rope_parameters"))
    assert read_checkpoint(tmp_path).shape.rope == toys.ROPE


def test_embeddings_beside_the_weights_are_left_out(form: Format, tmp_path: Path) -> None:
    original = export(tmp_path, form)
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(12, 8)})
    )
    assert logits(reload(tmp_path, original)).equal(logits(original))


def test_a_config_without_layer_ids_is_read(form: Format, tmp_path: Path) -> None:
    export(tmp_path, form)

    def forget(values: dict[str, Any]) -> None:
        values.pop("eagle_config", None)
        values.pop("eagle_aux_hidden_state_layer_ids", None)

    edit_config(tmp_path, forget)
    assert read_checkpoint(tmp_path).layers is None


def four_layers(values: dict[str, Any]) -> None:
    holder = values.get("eagle_config", values)
    holder["eagle_aux_hidden_state_layer_ids"] = [2, 30, 58, 61]


def config_fault(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, change)


def tensor_fault(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_d2t": (tensor_fault(lambda tensors: tensors.pop("d2t")), "no d2t"),
    "no_t2d": (tensor_fault(lambda tensors: tensors.pop("t2d")), "no t2d"),
    "ids_in_d2t": (
        tensor_fault(lambda tensors: tensors.update(d2t=torch.tensor(toys.USED))),
        "d2t",
    ),
    "four_layer_ids": (config_fault(four_layers), "lists 4 auxiliary layers"),
    "wrong_shape": (
        tensor_fault(lambda tensors: tensors.update({"fc.weight": torch.ones(8, 32)})),
        r"fc\.weight is \[8, 32\].*\[8, 24\]",
    ),
    "head_of_another_map": (
        tensor_fault(lambda tensors: tensors.update({"lm_head.weight": torch.ones(9, 8)})),
        r"lm_head\.weight is \[9, 8\].*\[7, 8\]",
    ),
    "unknown_tensor": (
        tensor_fault(lambda tensors: tensors.update({"fc_norm.weight": torch.ones(24)})),
        r"unknown \['fc_norm\.weight'\]",
    ),
    "missing_tensor": (
        tensor_fault(lambda tensors: tensors.pop("norm.weight")),
        r"missing tensors \['norm\.weight'\]",
    ),
    "size_not_in_the_config": (
        config_fault(lambda values: layer_of(values).pop("hidden_size")),
        "hidden_size",
    ),
    "norm_over_all_states": (
        config_fault(lambda values: values.update(norm_before_fc=True)),
        "norm_before_fc is true",
    ),
    "norms_that_the_weights_lack": (
        config_fault(lambda values: values.update(fc_norm=True)),
        r"missing tensors \['fc_norm\.0\.weight'",
    ),
    "config_no_json": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
    "weights_cut_off": (cut, "cannot be read"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_checkpoint_gives_one_error_that_names_it(
    form: Format, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    export(tmp_path, form)
    damage(tmp_path)
    with pytest.raises(DraftworksError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
