"""Brute-force EAGLE-3 training mathematics: the slow, obvious truth that tests compare against.

Written from shared/field/eagle3.md alone, one vector at a time in float64. It imports nothing of
the product on purpose, so that a convention misread in one place is not misread in both.

Row p of a document, at step k, has t = p + 1 + k. It reads token x_t, predicts x_{t+1}, and is
taught by the target's distribution at position t. It exists when t is inside the document.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Heads = list[Tensor]  # one vector of head_dim numbers per head


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    norm_before_residual: bool = False
    fc_norm: bool = False  # EAGLE-3.1: a norm of its own on each auxiliary state
    norm_output: bool = False  # EAGLE-3.1: the normed output is what the next step takes in


@dataclass(frozen=True)
class Document:
    token_ids: list[int]
    loss_mask: list[int]  # l_t, 1 where x_t was written by the assistant
    aux: Tensor  # [T, 3, H]: the three auxiliary hidden states at each position
    last: Tensor  # [T, H]: the last hidden state, the final norm already applied
    argmax: list[int]  # the target's full-vocabulary argmax at each position (its next token)


@dataclass(frozen=True)
class Result:
    loss: Tensor  # scalar, with a graph to every weight
    loss_rows: list[int]  # per step: rows that entered the loss
    valid_rows: list[int]  # per step: rows that count in accuracy (unteachable ones included)
    correct: list[int]  # per step: valid rows whose draft equals the target's argmax
    outcome: list[list[list[bool | None]]]  # [document][p in 0..T-2][k]; None: row not valid


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x * torch.rsqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE: turn the pair (x_i, x_{i + d/2}) by the angle position * theta^(-2i/d)."""
    half = len(x) // 2
    first, second = [], []
    for i in range(half):
        angle = position * theta ** (-2.0 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        first.append(x[i] * cos - x[i + half] * sin)
        second.append(x[i + half] * cos + x[i] * sin)
    return torch.stack(first + second)


def split_heads(x: Tensor, heads: int, head_dim: int) -> Heads:
    return [x[h * head_dim : (h + 1) * head_dim] for h in range(heads)]


def attend(query: Heads, keys: list[Heads], values: list[Heads], shape: Shape) -> Tensor:
    """Softmax attention of one query over the listed keys, all of them visible to it."""
    mixed = []
    for h in range(shape.heads):
        kv = h // (shape.heads // shape.kv_heads)  # the kv head this query head shares
        scores = [query[h] @ key[kv] / math.sqrt(shape.head_dim) for key in keys]
        shares = torch.softmax(torch.stack(scores), dim=0)
        head_out = torch.zeros(shape.head_dim, dtype=torch.float64)
        for j in range(len(values)):
            head_out = head_out + shares[j] * values[j][kv]
        mixed.append(head_out)
    return torch.cat(mixed)


def layer(
    weights: Weights,
    token_embedding: Tensor,
    hidden: Tensor,
    position: int,
    keys: list[Heads],
    values: list[Heads],
    shape: Shape,
) -> tuple[Tensor, Heads, Heads]:
    """The decoder layer for one row at one step: its raw output, and its own key and value.

    `keys` and `values` are those visible besides its own.
    """
    e = rms_norm(token_embedding, weights["layer.input_layernorm.weight"], shape.eps)
    h = rms_norm(hidden, weights["layer.hidden_norm.weight"], shape.eps)
    residual = h if shape.norm_before_residual else hidden

    x = torch.cat([e, h])
    q = split_heads(weights["layer.self_attn.q_proj.weight"] @ x, shape.heads, shape.head_dim)
    k = split_heads(weights["layer.self_attn.k_proj.weight"] @ x, shape.kv_heads, shape.head_dim)
    v = split_heads(weights["layer.self_attn.v_proj.weight"] @ x, shape.kv_heads, shape.head_dim)
    q = [rotate(head, position, shape.rope_theta) for head in q]
    k = [rotate(head, position, shape.rope_theta) for head in k]
    attention = attend(q, [*keys, k], [*values, v], shape)
    after = residual + weights["layer.self_attn.o_proj.weight"] @ attention

    m = rms_norm(after, weights["layer.post_attention_layernorm.weight"], shape.eps)
    gate = weights["layer.mlp.gate_proj.weight"] @ m
    up = weights["layer.mlp.up_proj.weight"] @ m
    gated = gate * torch.sigmoid(gate) * up  # SiLU(gate) * up
    return after + weights["layer.mlp.down_proj.weight"] @ gated, k, v


def first_hidden(weights: Weights, aux: Tensor, shape: Shape) -> Tensor:
    """fc over the three auxiliary states of a row, in order."""
    parts = [aux[i] for i in range(3)]
    if shape.fc_norm:
        parts = [rms_norm(parts[i], weights[f"fc_norm.{i}.weight"], shape.eps) for i in range(3)]
    return weights["fc.weight"] @ torch.cat(parts)


def row_loss(kind: str, teacher: Tensor, q_logits: Tensor) -> Tensor:
    """The loss of one row. alpha is the probability that sampled speculation keeps the draft."""
    log_q = torch.log_softmax(q_logits, dim=0)
    alpha = torch.zeros((), dtype=torch.float64)
    cross_entropy = torch.zeros((), dtype=torch.float64)
    entropy = torch.zeros((), dtype=torch.float64)
    for i in range(len(teacher)):
        q = torch.exp(log_q[i])
        alpha = alpha + (q if q < teacher[i] else teacher[i])
        cross_entropy = cross_entropy - teacher[i] * log_q[i]
        entropy = entropy - teacher[i] * torch.log(teacher[i])
    if kind == "cross_entropy":
        return cross_entropy
    if kind == "total_variation":
        return 1 - alpha
    if kind == "acceptance":
        return -torch.log(alpha)
    share = math.exp(-3 * alpha.item())  # a number: no gradient flows through it
    return share * (cross_entropy - entropy) + (1 - share) * (1 - alpha)


def reference(
    weights: Weights,
    embed: Tensor,
    target_head: Tensor,
    documents: list[Document],
    used: list[int],
    shape: Shape,
    steps: int,
    decay: float,
    stop_ids: set[int],
    kind: str = "cross_entropy",
) -> Result:
    # Zero times every weight: without a single loss row, gradients are still defined (all zero).
    nothing = sum((w.sum() * 0.0 for w in weights.values()), torch.zeros((), dtype=torch.float64))
    loss_sums = [nothing for _ in range(steps)]
    loss_rows, valid_rows, correct = [0] * steps, [0] * steps, [0] * steps
    outcome: list[list[list[bool | None]]] = []

    for document in documents:
        length = len(document.token_ids)
        outcome.append([])
        # Step-0 keys and values of the rows so far of this document, valid or not.
        step0_keys: list[Heads] = []
        step0_values: list[Heads] = []
        for p in range(length - 1):
            row: list[bool | None] = [None] * steps
            outcome[-1].append(row)
            own_keys: list[Heads] = []  # this row's keys of steps 1, 2, ...
            own_values: list[Heads] = []
            # At first from the target's states; later the layer's own output.
            hidden = first_hidden(weights, document.aux[p], shape)
            for k in range(steps):
                t = p + 1 + k
                if t > length - 1:
                    break
                token = document.token_ids[t]
                seen_keys, seen_values = step0_keys + own_keys, step0_values + own_values
                hidden, key, value = layer(
                    weights, embed[token], hidden, p + k, seen_keys, seen_values, shape
                )
                (step0_keys if k == 0 else own_keys).append(key)
                (step0_values if k == 0 else own_values).append(value)
                normed = rms_norm(hidden, weights["norm.weight"], shape.eps)
                if shape.norm_output:
                    hidden = normed

                # Valid: the assistant wrote x_t, and x_t does not end the answer.
                if document.loss_mask[t] != 1 or token in stop_ids:
                    continue
                q_logits = weights["lm_head.weight"] @ normed
                row[k] = used[int(q_logits.argmax())] == document.argmax[t]
                valid_rows[k] += 1
                correct[k] += int(row[k] is True)

                # A teacher outside the draft vocabulary is wrong above and not taught here.
                if document.argmax[t] not in used:
                    continue
                p_logits = torch.stack([target_head[i] @ document.last[t] for i in used])
                teacher = torch.softmax(p_logits, dim=0).detach()
                loss_sums[k] = loss_sums[k] + row_loss(kind, teacher, q_logits)
                loss_rows[k] += 1

    loss = nothing
    for k in range(steps):
        if loss_rows[k] > 0:
            loss = loss + decay**k * loss_sums[k] / loss_rows[k]
    return Result(loss, loss_rows, valid_rows, correct, outcome)


def walk(outcome_of_document: list[list[bool | None]], steps: int) -> tuple[int, int]:
    """Greedy speculation over one recorded document: (drafts made, draft tokens accepted)."""
    drafts, accepted = 0, 0
    t = 1  # the token just produced by the target; row t - 1 reads it
    while t - 1 < len(outcome_of_document):
        row = outcome_of_document[t - 1]
        if steps < 1 or row[0] is None:
            t += 1  # nothing is drafted here
            continue
        n = 0
        while n < steps and row[n] is True:  # the first miss, or None, ends the draft
            n += 1
        drafts += 1
        accepted += n
        t += n + 1  # the accepted tokens, and the one the target adds itself
    return drafts, accepted
