"""The EAGLE-3 drafter: one Llama-style layer over the target's own features.

Symbols as in the paper: g_t = three auxiliary states of the target at position t (3H), e = the
embedding of the next token, h = the hidden input. The layer attends over [e; h] (2H in).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

# What the rows of a draft step see: query [heads, R, d], key and value [kv_heads, R, d] -> mixed
# values [heads, R, d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter. `rope` is the rotary embedding in Hugging Face form."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    target_vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    norm_before_residual: bool = False

    def llama_config(self) -> LlamaConfig:
        """The same sizes as transformers and the engines spell them."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.target_vocab_size,
            rms_norm_eps=self.norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope),
            tie_word_embeddings=False,
        )


class Attention(nn.Module):
    """Grouped-query attention over [e; h], with the key-value pairs kept by the caller."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inputs = 2 * shape.hidden_size
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def project(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """[R, 2H] -> query [heads, R, d], key and value [kv_heads, R, d]."""
        query = self.q_proj(inputs).unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)
        key = self.k_proj(inputs).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(0, 1)
        value = self.v_proj(inputs).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(0, 1)
        cos, sin = (table.to(query.dtype) for table in rotary)
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=0)
        return query, key, value


class MLP(nn.Module):
    """SiLU-gated, as in Llama."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32 whatever the surroundings."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(x.dtype)


class Layer(nn.Module):
    """The drafter's only layer; names as in the checkpoints."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)


class Rotary(LlamaRotaryEmbedding):
    """Rotary tables whose frequencies stay float32 whatever the drafter is cast to: rounded to
    bfloat16 they turn far positions by whole radians."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in exact.items():
            setattr(self, name, table.to(getattr(self, name).device))
        return self


class Drafter(nn.Module):
    """fc, layer, norm and head. The embeddings [V, H] are the target's, frozen, not a weight.

    `forward` runs one draft step over R rows; `attend` says what the rows may see, so that
    packed training and cached decoding share everything else.
    """

    embeddings: Tensor

    def __init__(self, shape: DrafterShape, embeddings: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape.llama_config())
        self.register_buffer("embeddings", embeddings, persistent=False)

    def initialize(self, head: Tensor, final_norm: Tensor, seed: int) -> None:
        """Fresh weights: matrices normal(0, 0.02), head [N, H] and norm [H] from the target."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self.lm_head.weight.copy_(head)
            self.norm.weight.copy_(final_norm)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [R], hidden [R, H] (fc(g) at step 0, else the last step's output), positions
        [R] -> raw output [R, H]; logits are `lm_head(norm(output))`."""
        embedded = F.embedding(tokens, self.embeddings).to(hidden.dtype)
        normed = self.layer.hidden_norm(hidden)
        residual = normed if self.layer.norm_before_residual else hidden
        inputs = torch.cat([self.layer.input_layernorm(embedded), normed], dim=-1)
        rotary = tuple(table[0] for table in self.rotary(self.fc.weight, positions[None]))
        query, key, value = self.layer.self_attn.project(inputs, rotary)
        mixed = attend(query, key, value).transpose(0, 1).flatten(1)
        out = residual + self.layer.self_attn.o_proj(mixed)
        return cast("Tensor", out + self.layer.mlp(self.layer.post_attention_layernorm(out)))


class PackedAttend:
    """Training-time test over packed documents.

    At every step a query sees the step-0 keys of its own row and the rows before it in its
    document, and its own row's keys of the later steps. Work is the sum of the documents'
    squared lengths, never the square of the pack.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.context: list[tuple[Tensor, Tensor]] = []
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        if not self.context:
            self.context = list(
                zip(key.split(self.lengths, 1), value.split(self.lengths, 1), strict=True)
            )
            return torch.cat(
                [
                    F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
                    for q, (k, v) in zip(query.split(self.lengths, 1), self.context, strict=True)
                ],
                dim=1,
            )
        self.own_keys.append(key)
        self.own_values.append(value)
        scale = query.shape[-1] ** -0.5
        own = torch.stack([(query * own).sum(-1) for own in self.own_keys], dim=-1) * scale
        mixed = []
        start = 0
        for q, (k, v) in zip(query.split(self.lengths, 1), self.context, strict=True):
            rows = q.shape[1]
            end = start + rows
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, float("-inf"))
            weights = torch.cat([scores, own[:, start:end]], dim=-1).float().softmax(-1).to(v.dtype)
            out = weights[..., :rows] @ v
            for step, values in enumerate(self.own_values):
                out = out + weights[..., rows + step, None] * values[:, start:end]
            mixed.append(out)
            start = end
        return torch.cat(mixed, dim=1)
