"""The EAGLE-3 drafter: one Llama-style layer over the target's own features.

Symbols as in the paper: g_t = three auxiliary states of the target at position t (3H), e = the
embedding of the next token, h = the hidden input. The layer attends over [e; h] (2H in).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftworks.eagle3.rotary import Rotary, rotate

# What the rows of a draft step see: query [heads, Q, d], key and value [kv_heads, R, d] -> mixed
# values [heads, Q, d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DrafterShape:
    """Sizes and variants of a drafter. `rope` is the rotary embedding in Hugging Face form.

    norm_before_residual: the residual carries the normed hidden input. EAGLE-3.1: fc_norm norms
    each auxiliary state before fc; norm_output hands the normed output to the next step.
    """

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
    fc_norm: bool = False
    norm_output: bool = False


class Attention(nn.Module):
    """Projections of grouped-query attention over [e; h]."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inputs = 2 * shape.hidden_size
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def split(self, states: Tensor) -> Tensor:
        """[R, heads * d] -> [heads, R, d]."""
        return cast("Tensor", states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1))


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
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)


class Drafter(nn.Module):
    """fc, layer, norm and head. The embeddings [V, H] are the target's, frozen, not a weight.

    `features` makes the first hidden input, `forward` runs one draft step, `logits` reads its
    output; `attend` says what the rows may see, so that packed training and cached decoding share
    everything else.
    """

    embeddings: Tensor

    def __init__(self, shape: DrafterShape, embeddings: Tensor) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.norm_eps
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(3))
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.layer = Layer(shape)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape.rope, shape.head_dim)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.compiled = False

    def initialize(self, head: Tensor, final_norm: Tensor, seed: int) -> None:
        """Fresh weights: matrices normal(0, 0.02), head [N, H] and norm [H] from the target."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self.lm_head.weight.copy_(head)
            self.norm.weight.copy_(final_norm)

    def compile_steps(self) -> None:
        """Fuse what lies between matrix products and attention (and, by `compiled`, in the loss).
        The first step then takes a minute longer."""
        self.compiled = True
        for name in ("project", "finish"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def features(self, aux: Tensor) -> Tensor:
        """The target's auxiliary states [R, 3H] -> hidden input of step 0 [R, H]."""
        if self.shape.fc_norm:
            parts = zip(self.fc_norm, aux.chunk(3, dim=-1), strict=True)
            aux = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return cast("Tensor", self.fc(aux))

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """tokens [R], hidden [R, H] (`features` at step 0, else the last step's output), positions
        [R] -> output [Q, H]. rows: [Q] those that go on; the others are only seen by them."""
        residual, query, key, value = self.project(tokens, hidden, positions, rows)
        return self.finish(residual, attend(query, key, value))

    def project(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual [Q, H], query [heads, Q, d], key and value [kv_heads, R, d]."""
        layer, attention = self.layer, self.layer.self_attn
        embedded = F.embedding(tokens, self.embeddings).to(hidden.dtype)
        normed = layer.hidden_norm(hidden)
        residual = normed if self.shape.norm_before_residual else hidden
        inputs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        cos, sin = self.rotary(positions, inputs.dtype)
        key, value = (
            attention.split(attention.k_proj(inputs)),
            attention.split(attention.v_proj(inputs)),
        )
        key = rotate(key, (cos, sin))
        if rows is not None:
            residual, inputs, cos, sin = (states[rows] for states in (residual, inputs, cos, sin))
        query = rotate(attention.split(attention.q_proj(inputs)), (cos, sin))
        return residual, query, key, value

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """From the attention's mixed values [heads, Q, d] to the step's output [Q, H]."""
        layer = self.layer
        out = residual + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        return cast("Tensor", self.norm(out) if self.shape.norm_output else out)

    def normed(self, output: Tensor) -> Tensor:
        """What the head reads of a step's output."""
        return output if self.shape.norm_output else cast("Tensor", self.norm(output))

    def logits(self, output: Tensor) -> Tensor:
        """Over the draft vocabulary, [Q, N]."""
        return cast("Tensor", self.lm_head(self.normed(output)))
