"""Small drafters, documents and stores that the tests share.

Random and tiny, in float64 where a test asserts equality. Sizes are chosen so that no two agree
by chance: heads times head_dim is not the hidden size, draft and target vocabulary differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reference.eagle3 import Document
from torch import Tensor

from draftworks.config import TrainConfig
from draftworks.eagle3.drafter import Drafter, DrafterShape
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.records.samples import SampleEntry
from draftworks.training.loop import Data, Trainer
from draftworks.training.packing import Pack, split
from draftworks.workspace import digest

# In tensors this small a second thread only waits: a step takes 5 ms with one and 500 with two
# on a busy machine.
torch.set_num_threads(1)

STOP = 3
USED = (0, 2, STOP, 5, 8, 9, 11)
TARGET_VOCAB = 12
OUTSIDE = tuple(sorted(set(range(TARGET_VOCAB)) - set(USED)))
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
VOCABULARY = DraftVocabulary(torch.tensor(USED), TARGET_VOCAB)
SHAPE = DrafterShape(
    hidden_size=8,
    intermediate_size=10,
    heads=4,
    kv_heads=2,
    head_dim=6,
    draft_vocab_size=len(USED),
    target_vocab_size=TARGET_VOCAB,
    norm_eps=1e-5,
    max_position_embeddings=64,
    rope=ROPE,
)
TARGET_HEAD = torch.randn(
    TARGET_VOCAB, SHAPE.hidden_size, generator=torch.Generator().manual_seed(7), dtype=torch.float64
)


def shape(**changes: Any) -> DrafterShape:
    return replace(SHAPE, **changes)


def drafter(of: DrafterShape = SHAPE, seed: int = 0) -> Drafter:
    """A float64 drafter whose every weight is random, the norms' too."""
    random = torch.Generator().manual_seed(seed)
    size = (of.target_vocab_size, of.hidden_size)
    made = Drafter(of, torch.randn(size, generator=random, dtype=torch.float64)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(0.4 * noise if parameter.dim() == 2 else 1 + 0.3 * noise)
    return made


def document(sketch: str, seed: int = 0) -> Document:
    """A random document of one token per letter.

    `.` prompt, `a` answer, `o` answer whose teacher is outside the draft vocabulary, `s` a stop
    token in the answer.
    """
    random = torch.Generator().manual_seed(1000 + seed)
    size, hidden = len(sketch), SHAPE.hidden_size

    def pick(ids: Sequence[int]) -> int:
        return ids[int(torch.randint(len(ids), (), generator=random))]

    others = [token for token in range(TARGET_VOCAB) if token != STOP]
    return Document(
        token_ids=[STOP if letter == "s" else pick(others) for letter in sketch],
        loss_mask=[int(letter != ".") for letter in sketch],
        aux=torch.randn(size, 3, hidden, generator=random, dtype=torch.float64),
        last=torch.randn(size, hidden, generator=random, dtype=torch.float64),
        argmax=[pick(OUTSIDE if letter == "o" else USED) for letter in sketch],
    )


def documents(*sketches: str) -> list[Document]:
    return [document(sketch, seed) for seed, sketch in enumerate(sketches)]


def pack(items: Sequence[Document], stop_ids: Sequence[int] = (STOP,)) -> Pack:
    """What `load_pack` would give, for any mask."""
    lengths = tuple(len(item.token_ids) for item in items)
    tokens = torch.tensor([token for item in items for token in item.token_ids])
    written = torch.tensor([bool(flag) for item in items for flag in item.loss_mask])
    ends = [sum(lengths[: i + 1]) - 1 for i, length in enumerate(lengths) for _ in range(length)]
    return Pack(
        lengths,
        tokens,
        torch.cat([item.aux.flatten(1) for item in items]),
        torch.cat([item.last for item in items]),
        torch.tensor([token for item in items for token in item.argmax]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.tensor(ends),
        written & ~torch.isin(tokens, torch.tensor(list(stop_ids))),
    )


def store(
    root: Path, items: Sequence[Document], dtype: torch.dtype = torch.float64
) -> tuple[StateStore, list[SampleEntry]]:
    """The documents committed to a store, each a conversation of its own. A mask there is a
    prompt and an answer."""
    states = StateStore(root)
    writer = StateWriter(states, Convention((1, 2, 3), True, str(dtype), "toy", "0"))
    entries = []
    for number, item in enumerate(items):
        name = digest([number, item.token_ids])
        tokens = torch.tensor(item.token_ids, dtype=torch.int32)
        argmax = torch.tensor(item.argmax, dtype=torch.int32)
        writer.commit(
            name,
            item.token_ids,
            SampleStates(tokens, item.aux.to(dtype), item.last.to(dtype), argmax),
        )
        prompt = item.loss_mask.index(1) if 1 in item.loss_mask else len(tokens)
        entries.append(SampleEntry(name, f"conversation-{number}", len(tokens), prompt))
    writer.close()
    return states, entries


def gradients(of: Drafter) -> dict[str, Tensor]:
    """Take the gradients out of a drafter. A parameter that has none is an error."""
    taken = {}
    for name, parameter in of.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        taken[name] = parameter.grad
        parameter.grad = None
    return taken


# A language that a drafter can learn: every token is followed by one other, always the same.
CYCLE_SHAPE = shape(hidden_size=16, intermediate_size=24)
_random = torch.Generator().manual_seed(3)
CYCLE_EMBEDDINGS = torch.randn(TARGET_VOCAB, 16, generator=_random)
CYCLE_HEAD = torch.nn.functional.normalize(torch.randn(TARGET_VOCAB, 16, generator=_random))
CYCLE_FEATURES = torch.randn(TARGET_VOCAB, 3, 16, generator=_random)
CYCLE = dict(zip(USED, USED[1:] + USED[:1], strict=True))


def cycle_document(start: int, length: int, prompt: int) -> Document:
    """`length` tokens of the language from token number `start` on, and what its target saw."""
    tokens = [USED[(start + i) % len(USED)] for i in range(length)]
    following = [CYCLE[token] for token in tokens]
    return Document(
        tokens,
        [int(i >= prompt) for i in range(length)],
        CYCLE_FEATURES[tokens],
        12 * CYCLE_HEAD[following],
        following,
    )


def cycle_data(root: Path, count: int = 16) -> Data:
    """A store of `count` conversations of 6 to 12 tokens, a quarter of them held out."""
    items = [cycle_document(i, 6 + 5 * i % 7, 1 + i % 3) for i in range(count)]
    states, entries = store(root, items, torch.bfloat16)
    training, validation = split(entries, 0.25, seed=0)
    return Data(states, training, validation, frozenset({1}))


def cycle_config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "epochs": 5,
        "pack_tokens": 24,
        "learning_rate": 0.01,
        "compute_dtype": "float32",
        "validate_every": 5,
        "checkpoint_every": 4,
    }
    return TrainConfig(**settings | changes)


def cycle_trainer(folder: Path, data: Data, config: TrainConfig) -> Trainer:
    """A trainer with a fresh drafter of the language, the same at every call."""
    embeddings = CYCLE_EMBEDDINGS.to(getattr(torch, config.compute_dtype))
    fresh = Drafter(CYCLE_SHAPE, embeddings)
    head = CYCLE_HEAD[list(USED)]
    fresh.initialize(head, torch.ones(16), config.seed)
    return Trainer(config, fresh, head.to(embeddings.dtype), VOCABULARY, data, folder)
