"""The settings of every stage: one frozen, typed model each, composed into the pipeline's.

A field marked *operational* (how fast, how often, where) does not change the result and is left
out of an artifact's identity.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftworks.errors import DraftworksError


class Settings(BaseModel):
    """Frozen, and strict about names: a misspelt setting is refused, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as plain JSON values."""
        values = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            value = getattr(self, name)
            if isinstance(extra, dict) and extra.get("operational"):
                del values[name]
            elif isinstance(value, Settings):
                values[name] = value.identity()
        return values


OPERATIONAL: dict[str, Any] = {"operational": True}

Loss = Literal["cross_entropy", "total_variation", "acceptance", "hybrid"]


class TargetConfig(Settings, title="Target"):
    """The model that the drafter is made for."""

    model: str = "smollm2-135m-instruct"
    """The bundled model's name, a folder in Hugging Face form, or a hub id."""
    revision: str | None = None
    """Revision of the hub repository; its default branch when empty."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless you trust its author."""


class PromptsConfig(Settings, title="Prompts"):
    """Where the conversations come from."""

    path: str = Field("demo", json_schema_extra=OPERATIONAL)
    """A .jsonl or .parquet file (strings, OpenAI messages or ShareGPT), or 'demo' for the
    shipped set. The content decides the identity, not the path."""
    limit: int | None = Field(None, ge=1)
    """Use only this many prompts, from the top."""
    skip_too_long: bool = False
    """Leave out prompts that do not fit the context, counted, instead of refusing the file."""


class EndpointConfig(Settings, title="Endpoint"):
    """An OpenAI-compatible server that runs the target."""

    block: str | None = Field(None, json_schema_extra=OPERATIONAL)
    """Name of a 'Draftworks endpoint' block whose values replace those below."""
    base_url: str = Field("http://127.0.0.1:8000/v1", json_schema_extra=OPERATIONAL)
    """Address up to and including /v1."""
    model: str = Field("", json_schema_extra=OPERATIONAL)
    """Name of the model there; the target's name when empty."""
    api_key_env: str | None = Field(None, json_schema_extra=OPERATIONAL)
    """Environment variable that holds the key. The key itself never enters a config."""
    in_flight: int = Field(64, ge=1, le=4096, json_schema_extra=OPERATIONAL)
    """Requests kept open at once."""
    timeout_seconds: float = Field(600, gt=0, json_schema_extra=OPERATIONAL)
    """Longest time for one answer."""
    attempts: int = Field(6, ge=1, le=20, json_schema_extra=OPERATIONAL)
    """Tries per prompt for faults that can pass (429, 5xx, a broken connection)."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Sent with every request as is, such as {"chat_template_kwargs": {"thinking": true}}."""


class GenerateConfig(Settings, title="Generate"):
    """Answers of the target: the drafter learns from what its target really says."""

    engine: Literal["reference", "endpoint"] = "reference"
    """The built-in engine, or a server with an OpenAI-compatible API."""
    endpoint: EndpointConfig = EndpointConfig()
    """Used by the engine 'endpoint'."""
    max_new_tokens: int = Field(1024, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(0.0, ge=0, le=2)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampling; 1 keeps everything."""
    seed: int = Field(0, ge=0)
    """Sampling seed; each prompt has its own stream."""
    keep_truncated: bool = False
    """Keep answers that ended by length. They are counted either way."""
    part_size: int = Field(64, ge=1, le=4096)
    """Prompts per committed part; the reference engine decodes a part as one batch."""
    reasoning_open: str = "<think>"
    """Opening mark of reasoning that a server returns in a field of its own."""
    reasoning_close: str = "</think>"
    """Its closing mark."""


class VocabConfig(Settings, title="Draft vocabulary"):
    """The draft vocabulary: the target's most frequent tokens, so that the head stays small."""

    size: int = Field(32_000, ge=2)
    """Draft tokens. More cover more of the text and cost time in every draft step."""
    always: tuple[str, ...] = ()
    """Tokens that are in whatever their count, beside the stop tokens (think and tool marks)."""


class EngineConfig(Settings, title="Engine server"):
    """How a served engine is started for this target: data, with the reason for each flag."""

    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the target."""
    port: int = Field(8000, ge=1, le=65535, json_schema_extra=OPERATIONAL)
    """Port of 127.0.0.1 that the server listens on."""
    flags: dict[str, str] = Field(default_factory=dict)
    """Command-line flags of the server."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""
    reasons: dict[str, str] = Field(default_factory=dict, json_schema_extra=OPERATIONAL)
    """Why each flag or variable is there."""


class ExtractConfig(Settings, title="Extract"):
    """Hidden states: what the drafter sees of its target, per token."""

    engine: Literal["reference", "vllm", "sglang"] = "reference"
    """What runs the target."""
    server: EngineConfig = EngineConfig()
    """Used by the engines vllm and sglang."""
    layers: tuple[int, int, int] | None = None
    """Canonical ids of the auxiliary states (k = after k layers); 2, n//2, n-3 when empty."""
    dtype: Literal["bfloat16"] = "bfloat16"
    """How the states are stored."""
    batch_tokens: int = Field(4096, ge=1, json_schema_extra=OPERATIONAL)
    """Tokens of one forward pass of the reference engine."""


class DrafterConfig(Settings, title="Drafter"):
    """The drafter's shape. What is empty is taken from the target."""

    heads: int | None = Field(None, ge=1)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key-value heads."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLP."""
    norm_before_residual: bool = False
    """The residual carries the normed hidden state instead of the raw one. vLLM reads this;
    SGLang does not."""
    fc_norm: bool = False
    """EAGLE-3.1: each auxiliary state is normed before it enters the drafter."""
    norm_output: bool = False
    """EAGLE-3.1: a draft step hands on its normed output, so that magnitudes do not drift."""
    rope: dict[str, Any] | None = None
    """Rotary embedding in Hugging Face form (rope_type, rope_theta, factor, ...)."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Longest position the engine may ask for; too small makes long contexts slower than no
    speculation."""


class TrainConfig(Settings, title="Train"):
    """EAGLE-3 training with training-time test."""

    drafter: DrafterConfig = DrafterConfig()
    """Shape of the drafter."""
    warm_start: str | None = None
    """Folder of an existing drafter (either format). Its draft vocabulary is inherited."""
    ttt_steps: int = Field(3, ge=1, le=16)
    """Draft steps unrolled in training (K)."""
    step_decay: float = Field(0.8, gt=0, le=1)
    """Weight of step k is step_decay^k."""
    loss: Loss = "cross_entropy"
    """cross_entropy with the target's distribution; total_variation, the share of sampled drafts
    that is rejected; acceptance, -log of the share kept; hybrid, divergence first, then
    total_variation."""
    train_head: bool = True
    """Train the draft head; off, it stays the target's own rows."""
    epochs: int = Field(5, ge=1)
    """Passes over the training conversations."""
    pack_tokens: int = Field(2048, ge=2)
    """Token budget of one pack of samples."""
    accumulate: int = Field(1, ge=1)
    """Packs per optimizer step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw for all weights, or muon for the layer's matrices and adamw for head and norms."""
    learning_rate: float = Field(1e-4, gt=0, le=1)
    """Peak learning rate."""
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the steps with a rising learning rate; then cosine."""
    final_rate: float = Field(0.02, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices."""
    beta2: float = Field(0.95, gt=0, lt=1)
    """Second-moment decay of AdamW."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    validation_share: float = Field(0.08, gt=0, lt=1)
    """Share of the conversations kept out of training."""
    seed: int = Field(0, ge=0)
    """Initial weights, data order and split."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of matrix products; weights and optimizer stay float32."""
    compile: bool = Field(False, json_schema_extra=OPERATIONAL)
    """Fuse the element-wise parts of a step (torch.compile). The first step takes a minute longer,
    so it pays from a few hundred steps on."""
    gpus: int = Field(0, ge=0)
    """GPUs; 0 trains on the CPU."""
    validate_every: int = Field(100, ge=1, json_schema_extra=OPERATIONAL)
    """Steps between validations; the last step always validates."""
    checkpoint_every: int = Field(50, ge=1, json_schema_extra=OPERATIONAL)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1, json_schema_extra=OPERATIONAL)
    """Newest checkpoints kept."""


class EvaluateConfig(Settings, title="Evaluate"):
    """Acceptance by real speculation, beside the estimate from the stored states."""

    draft_tokens: int = Field(3, ge=1, le=16)
    """Tokens drafted before each verification."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest answer, in tokens."""
    prompts: int = Field(32, ge=1)
    """Held-out conversations used."""
    batch: int = Field(32, ge=1, json_schema_extra=OPERATIONAL)
    """Prompts decoded at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the target. In float32 speculative and plain output must be identical."""
    tolerance: float = Field(0.10, gt=0, lt=1)
    """Largest relative difference between measured and estimated acceptance length."""


class PublishConfig(Settings, title="Publish"):
    """The drafter in the forms that engines load."""

    formats: tuple[Literal["eagle", "speculators"], ...] = ("eagle", "speculators")
    """eagle: SGLang and vLLM. speculators: vLLM, also as --model."""


class GatesConfig(Settings, title="Gates"):
    """What opens the next stage. Nothing here changes a result."""

    on_incomplete: Literal["fail", "wait"] = "fail"
    """When the files of an earlier stage are not complete: end with the true count, or wait and
    watch. A pipeline's own stages always wait for each other."""
    share: float = Field(1.0, ge=0, le=1)
    """Share of the units whose every byte is read, chosen anew each time; the others are held
    against their sizes only. 1 reads everything."""


class JobsConfig(Settings, title="Jobs"):
    """Where the work runs, and what is proved about it before. Nothing here changes a result."""

    python: str = ""
    """Interpreter of the environment that runs the jobs; the worker's own when empty."""
    requires: dict[str, str] = Field(default_factory=dict)
    """Package -> version range which that environment must have, such as {"torch": ">=2.10"}."""
    prepare: bool = True
    """Prepare each stage while the one before it runs: its checks, and the stage itself on a few
    samples. Without it, a stage is checked when its turn has come."""
    notify: str | None = None
    """Notification block, such as "slack-webhook/team", that is told of failed preparations."""


class PlanConfig(Settings, title="Plan"):
    """What is known of data, target and host before any work, so that there is a plan without
    them. What has been counted or measured in the workspace takes its place. Changes no result."""

    samples: int | None = Field(None, ge=1)
    """Samples that generation will leave."""
    tokens_per_sample: float | None = Field(None, gt=0)
    """Mean length of a sample, prompt and answer, in tokens."""
    hidden_size: int | None = Field(None, ge=1)
    """Width of the target's hidden states."""
    target_gb: float | None = Field(None, gt=0)
    """Size of the target's weights in GB, for the time that loading them takes."""
    generate_rate: float | None = Field(None, gt=0)
    """Tokens per second of generation, prompts included."""
    extract_rate: float | None = Field(None, gt=0)
    """Tokens per second of extraction."""
    train_tflops: float | None = Field(None, gt=0)
    """TFLOP/s that one GPU reaches in training."""
    bus_gbps: dict[int, float] = Field(default_factory=dict)
    """GPUs -> GB/s of one link, each way, while so many exchange gradients (the "bus bandwidth" of
    nccl-tests)."""
    disk_gbps: float | None = Field(None, gt=0)
    """GB/s that the workspace's disk reads."""


class PipelineConfig(Settings, title="Pipeline"):
    """Everything that decides a drafter, from prompts to published checkpoint."""

    name: str = Field("smollm2-demo", pattern=r"^[A-Za-z0-9._-]+$", json_schema_extra=OPERATIONAL)
    """Name of this pipeline in reports."""
    workspace: str = Field("./workspace", json_schema_extra=OPERATIONAL)
    """Folder for artifacts, jobs and reports; on the host that does the work."""
    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    generate: GenerateConfig = GenerateConfig()
    vocab: VocabConfig = VocabConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    publish: PublishConfig = PublishConfig()
    gates: GatesConfig = Field(GatesConfig(), json_schema_extra=OPERATIONAL)
    jobs: JobsConfig = Field(JobsConfig(), json_schema_extra=OPERATIONAL)
    plan: PlanConfig = Field(PlanConfig(), json_schema_extra=OPERATIONAL)
    allow_partial: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]+$", json_schema_extra=OPERATIONAL
    )
    """For experiments only: the name of one that trains on the hidden states that are committed
    when it first starts. It lives in a workspace of its own, and report and model card say so."""

    @model_validator(mode="after")
    def _drafts_what_it_trained(self) -> "PipelineConfig":
        if self.evaluate.draft_tokens > self.train.ttt_steps:
            raise ValueError(
                f"evaluate.draft_tokens {self.evaluate.draft_tokens} is more than "
                f"train.ttt_steps {self.train.ttt_steps}: the estimate covers trained steps only"
            )
        return self


def recipes() -> list[str]:
    """Names of the shipped parameter sets."""
    folder = resources.files("draftworks") / "recipes"
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))


def recipe(name: str) -> PipelineConfig:
    """A shipped parameter set by its name. Raises DraftworksError."""
    if name not in recipes():
        raise DraftworksError(f"no recipe {name!r}; there are {', '.join(recipes())}")
    source = resources.files("draftworks") / "recipes" / f"{name}.yaml"
    return parse(source.read_text(encoding="utf-8"), f"recipe {name}")


def load(source: str) -> PipelineConfig:
    """A recipe by name, or a YAML or JSON file by path. Raises DraftworksError."""
    if source in recipes():
        return recipe(source)
    path = Path(source)
    if not path.is_file():
        raise DraftworksError(
            f"config {source}: neither a file nor a recipe ({', '.join(recipes())})"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DraftworksError(f"{path}: not UTF-8 text: {error.reason}") from None
    return parse(text, str(path))


def parse(text: str, origin: str) -> PipelineConfig:
    """Raises DraftworksError that names every wrong field of `origin`."""
    try:
        return PipelineConfig.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise DraftworksError(f"{origin}: neither YAML nor JSON: {error}") from None
    except ValidationError as error:
        faults = [
            f"  {'.'.join(str(part) for part in fault['loc']) or 'config'}: {fault['msg']}"
            + ("" if isinstance(found := fault["input"], dict) else f" (found {_shown(found)})")
            for fault in error.errors()
        ]
        raise DraftworksError(
            f"{origin}: {len(faults)} wrong settings\n" + "\n".join(faults)
        ) from None


def _shown(value: Any) -> str:
    """As JSON; YAML also knows dates and bytes, which have none."""
    return json.dumps(value, default=str)
