"""The target: what is read of it, how little, and what is said when it is not there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks import bundled
from draftworks.config import TargetConfig
from draftworks.errors import DraftworksError
from draftworks.target import Target


@pytest.fixture
def folder(tiny_target: Target, tmp_path: Path) -> Path:
    """A copy of the tiny target to spoil."""
    return Path(shutil.copytree(tiny_target.folder, tmp_path / "target"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def resolve(model: Path | str) -> Target:
    return Target.resolve(TargetConfig(model=str(model)))


def refused(model: Path | str) -> str:
    with pytest.raises(DraftworksError) as caught:
        resolve(model)
    return str(caught.value)


# Finding it


def test_a_folder_is_a_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    target = resolve("target")
    monkeypatch.chdir("/")
    assert target.folder == folder
    assert (target.hidden_size, target.layers, target.vocab_size) == (64, 8, 320)
    assert (target.context, target.architectures) == (512, ["LlamaForCausalLM"])


@pytest.mark.parametrize("name", ["none", "./none", "/none/at-all", "~/none", "a/b/c", ""])
def test_a_name_that_is_nothing_says_what_it_could_be(name: str) -> None:
    message = refused(name)
    assert repr(name) in message
    assert "Give a folder in Hugging Face form, a hub id" in message


def test_a_hub_id_out_of_reach_is_one_message() -> None:
    assert "the hub did not give it" in refused("nobody/nothing")


def test_the_bundled_target_must_be_fetched_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWORKS_CACHE", str(tmp_path))
    assert "Run `python -m draftworks fetch` once" in refused(bundled.NAME)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("config.json", "no config.json", id="config"),
        pytest.param("tokenizer.json", "no tokenizer", id="tokenizer"),
        pytest.param("*.safetensors", "no *.safetensors weights", id="weights"),
    ],
)
def test_a_missing_file_is_named(folder: Path, pattern: str, expected: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()
    message = refused(folder)
    assert str(folder) in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("config.json", b'{"hidden_size": "64"}'),
        ("config.json", b"\xff"),
        ("generation_config.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\x00"),
        ("model.safetensors", b""),
        ("model.safetensors", b"garbage garbage"),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"\x03" + bytes(7) + b"[1]"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"{}"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:20]),
)
def test_a_damaged_file_is_one_message_that_names_it(
    folder: Path, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DraftworksError) as caught:  # noqa: PT012
        target = resolve(folder)
        _ = target.vocab_size, target.stop_ids, target.fingerprint
    message = str(caught.value)
    assert str(folder) in message
    assert name.removesuffix(".json") in message


def test_a_base_model_without_a_chat_template_is_refused(folder: Path) -> None:
    for path in folder.glob("*.jinja"):
        path.unlink()
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(DraftworksError, match="no chat template; a base model"):
        resolve(folder).render([{"role": "user", "content": "Hi"}])


# Text


def test_a_conversation_is_rendered_up_to_the_answer(tiny_target: Target) -> None:
    ids = tiny_target.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 👋"}]
    )
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 👋<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tiny_target.text(ids, special=True) == expected
    assert ids.count(tiny_target.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert "<|im" not in tiny_target.text(ids)


def test_stop_ids_come_from_everywhere(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    edit(folder / "config.json", eos_token_id=11)
    assert resolve(folder).stop_ids == {7, 9, 11, 1}
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    assert resolve(folder).stop_ids == {1}


# Layers


def test_default_layers_are_the_ones_engines_share(tiny_target: Target) -> None:
    assert tiny_target.auxiliary_layers(None) == (2, 4, 5)
    assert tiny_target.auxiliary_layers((1, 2, 7)) == (1, 2, 7)


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 1, 2), (3, 2, 4), (1, 2, 8), (-1, 2, 3)])
def test_layers_that_are_not_there_are_refused(
    tiny_target: Target, layers: tuple[int, int, int]
) -> None:
    with pytest.raises(DraftworksError, match="a target of 8 layers needs three rising ids"):
        tiny_target.auxiliary_layers(layers)


# Weights


def shard(
    folder: Path, rename: Callable[[str], str] = lambda name: name, extra: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Spread the weights over one file per tensor, with an index. Returns them by old name."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named = {rename(name): tensor for name, tensor in tensors.items()}
    named |= {name: torch.zeros(2, 2) for name in extra}
    weight_map = {name: f"model-{number:05d}.safetensors" for number, name in enumerate(named)}
    for name, file in weight_map.items():
        save_file({name: named[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def without_the_rest(target: Target, ending: str) -> Target:
    """Of all shards only the one with this tensor stays; half of the others become garbage."""
    for name, path in target.weight_files.items():
        if not name.endswith(ending) or "layers" in name:
            path.unlink()
            if "layers" in name:
                path.write_bytes(b"garbage")
    return target


READS: dict[str, Callable[[Target], Tensor]] = {
    "embed_tokens.weight": Target.embeddings,
    "lm_head.weight": Target.head,
    "model.norm.weight": Target.norm,
}


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("ending", READS)
def test_a_tensor_is_read_from_its_own_shard_alone(folder: Path, prefix: str, ending: str) -> None:
    (expected,) = (
        tensor
        for name, tensor in shard(folder, lambda name: prefix + name).items()
        if name.endswith(ending)
    )
    target = without_the_rest(resolve(folder), ending)
    assert torch.equal(READS[ending](target), expected)


def test_one_file_without_an_index_is_read_too(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    target = resolve(folder)
    assert torch.equal(target.embeddings(), tensors["model.embed_tokens.weight"])
    assert torch.equal(target.head(), tensors["lm_head.weight"])
    assert torch.equal(target.norm(), tensors["model.norm.weight"])
    assert target.norm().dtype == torch.bfloat16


def test_a_multimodal_target_is_read_by_its_language_model(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "both", "text_config": text}))
    towers = ("vision_tower.embed_tokens.weight", "audio_tower.embed_tokens.weight")
    tensors = shard(folder, lambda name: f"language_model.{name}", towers)
    target = resolve(folder)
    assert target.hidden_size == 64
    assert torch.equal(target.embeddings(), tensors["model.embed_tokens.weight"])
    assert torch.equal(target.norm(), tensors["model.norm.weight"])


@pytest.mark.parametrize("how", ["flag", "absent"])
def test_a_tied_head_is_the_embeddings(folder: Path, how: str) -> None:
    if how == "flag":
        edit(folder / "config.json", tie_word_embeddings=True)
    else:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    target = resolve(folder)
    assert torch.equal(target.head(), target.embeddings())


@pytest.mark.parametrize("ending", READS)
def test_a_missing_shard_is_named_with_its_tensor(folder: Path, ending: str) -> None:
    shard(folder)
    target = resolve(folder)
    (name,) = (name for name in target.weight_files if name.endswith(ending))
    target.weight_files[name].unlink()
    expected = rf"{target.weight_files[name].name} holds {name} but is missing; download"
    with pytest.raises(DraftworksError, match=expected):
        READS[ending](target)


@pytest.mark.parametrize("ending", READS)
def test_a_damaged_shard_is_named(folder: Path, ending: str) -> None:
    shard(folder)
    target = resolve(folder)
    (name,) = (name for name in target.weight_files if name.endswith(ending))
    target.weight_files[name].write_bytes(target.weight_files[name].read_bytes()[:-10])
    with pytest.raises(DraftworksError, match=target.weight_files[name].name):
        READS[ending](target)


def test_two_tensors_that_could_be_it_are_not_guessed_between(folder: Path) -> None:
    shard(folder, extra=("draft.embed_tokens.weight",))
    with pytest.raises(DraftworksError, match=r"exactly one tensor ending in embed_tokens"):
        resolve(folder).embeddings()


# Fingerprint


def test_the_fingerprint_is_the_same_elsewhere(folder: Path, tiny_target: Target) -> None:
    assert resolve(folder).fingerprint == tiny_target.fingerprint


def change_one_weight(folder: Path) -> None:
    """As after fine-tuning: same names, same shapes, same file size."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor * 1.01 for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda f: edit(f / "config.json", rope_theta=5.0), id="config"),
        pytest.param(lambda f: edit(f / "generation_config.json", eos_token_id=5), id="stops"),
        pytest.param(lambda f: (f / "chat_template.jinja").write_text("hi"), id="template"),
        pytest.param(lambda f: edit(f / "tokenizer.json", version="2.0"), id="tokenizer"),
        pytest.param(change_one_weight, id="weights"),
        pytest.param(shard, id="shards"),
    ],
)
def test_the_fingerprint_follows_every_change(
    folder: Path, tiny_target: Target, change: Callable[[Path], object]
) -> None:
    change(folder)
    assert resolve(folder).fingerprint != tiny_target.fingerprint


def test_the_fingerprint_can_be_taken_while_shards_are_missing(folder: Path) -> None:
    shard(folder)
    whole = resolve(folder).fingerprint
    (folder / "model-00003.safetensors").unlink()
    assert resolve(folder).fingerprint != whole
