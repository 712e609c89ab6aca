"""speculators 0.9.0's EAGLE-3 model, loss and optimizer on the folder of a comparison.

Changed for a CPU without its data files: the trainer's loop body is repeated here because the
package's sends its model to a GPU by number; attention is its `sdpa` way under a dense mask, the
fastest of its ways that run here (flex attention has no backward pass on CPUs); its loss is its
`eager` implementation, since the fused one is written in Triton; the verifier's norm is skipped,
since our states are normed already.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from exchange import Exchange, Sample, process_started, set_rate

STARTED = process_started()


def main() -> None:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from transformers import LlamaConfig

    exchange = Exchange(Path(sys.argv[1]))
    settings, target = exchange.settings, exchange.target()
    shape = settings["shape"]
    layer = LlamaConfig(**settings["layer"])
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        norm_before_residual=False,
    )
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(target["t2d"], target["d2t"])
    ours = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in exchange.weights().items()
    }
    frozen = {
        "embed_tokens.weight": target["embeddings"],
        "verifier_lm_head.weight": target["head"][target["t2d"]],
    }
    missing, unknown = model.load_state_dict(ours | frozen, strict=False)
    assert not unknown, unknown
    assert not {name for name in missing if name not in ("d2t", "t2d", "verifier_norm.weight")}
    model.verifier_norm = torch.nn.Identity()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ours)
    model.train()
    optimizers = build_optimizers(
        model, TrainerConfig(lr=1e-3, num_epochs=1, save_path="", weight_decay=0.0)
    )
    collate = CollateFn(settings["pack_tokens"], shape["hidden_size"], preprocess=shift_batch)
    losses = resolve_loss_config("kl_div", "eager")

    def step(number: int) -> int:
        samples = exchange.samples(number)
        batch = collate([sample_of(sample) for sample in samples])
        batch.pop("error_records")
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(
                **batch,
                ttt_steps=settings["draft_steps"],
                ttt_step_loss_decay=settings["step_decay"],
                loss_config=losses,
            )
        for optimizer in optimizers:
            set_rate(optimizer, settings["rates"][number], settings["beta2"])
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        for optimizer in optimizers:
            optimizer.step()
        return sum(len(sample["tokens"]) for sample in samples)

    def weights() -> dict[str, Any]:
        named = {name.replace("layers.0.", "layer."): w for name, w in model.named_parameters()}
        return {name: named[name] for name in exchange.weights()}

    exchange.run("speculators", STARTED, step, weights)


def sample_of(sample: Sample) -> dict[str, torch.Tensor]:
    length = len(sample["tokens"])
    return {
        "hidden_states": sample["aux"],
        "input_ids": sample["tokens"],
        "verifier_last_hidden_states": sample["last"],
        "loss_mask": sample["counts"],
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


main()
