"""Generate: the target answers the prompts, and its exact tokens become the samples."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from typing import Any

from draftworks.engines.endpoint import Answer, answers, probe
from draftworks.errors import DraftworksError
from draftworks.estimates.rates import alike
from draftworks.progress import Progress
from draftworks.records.inspection import Inspection
from draftworks.records.prompts import Prompt, prompts_file, read_prompts
from draftworks.records.samples import Rejected, Sample, SampleStore, SampleWriter
from draftworks.stages.base import NO_RATE, Check, Plan, Sizes, Stage, Verdict, check
from draftworks.workspace import digest

TYPICAL_PROMPT = 128  # tokens, where nothing is known


class Generate(Stage):
    name = "generate"
    title = "samples"
    unit = "prompts"

    @cached_property
    def prompts(self) -> list[Prompt]:
        """All prompts of the file, or with `skip_too_long` those that fit the context."""
        prompts = read_prompts(self.config.prompts)
        if not self.config.prompts.skip_too_long:
            return prompts
        return [prompt for prompt in prompts if len(self.encode(prompt)) <= self._room]

    @property
    def store(self) -> SampleStore:
        return SampleStore(self.directory)

    def settings(self) -> Mapping[str, Any]:
        return {
            "target": self.target.fingerprint,
            "prompts": digest([prompt.id for prompt in self.prompts]),
            "generate": self.config.generate.identity(),
        }

    @cached_property
    def sizes(self) -> Sizes:
        """Of the pipeline: counted in the samples that are there, else as stated in the config,
        else from the prompts and the longest answer."""
        stated, entries = self.config.plan, []
        if stated.samples and stated.tokens_per_sample and stated.hidden_size:
            # Target and prompts need not be here; and a plan is no reason to fetch 500 GB.
            if any(alike(self.workspace, self.config, self.name)):
                with suppress(DraftworksError):
                    entries = self.store.index()
            if not entries:
                mean = stated.tokens_per_sample
                return Sizes(
                    stated.samples,
                    round(stated.samples * mean),
                    f"{stated.samples:,} samples of {mean:,.0f} tokens, as the config states",
                    stated.hidden_size,
                )
        entries = entries or self.store.index()
        if entries:
            tokens, seen = sum(entry.tokens for entry in entries), len(self.store.conversations())
            if seen >= len(self.prompts):
                source = "counted in the samples"
                return Sizes(len(entries), tokens, source, self.target.hidden_size)
            factor = len(self.prompts) / seen
            return Sizes(
                round(len(entries) * factor),
                round(tokens * factor),
                f"as the first {len(entries):,} samples are",
                self.target.hidden_size,
            )
        longest = self.config.generate.max_new_tokens
        return Sizes(
            len(self.prompts),
            len(self.prompts) * (longest + TYPICAL_PROMPT),
            f"at most {longest:,} answer tokens and about {TYPICAL_PROMPT} of prompt each",
            self.target.hidden_size,
        )

    def plan(self) -> Plan:
        sizes = self.sizes
        rate = self.rate(self.config.plan.generate_rate)
        return Plan(
            self.name,
            sizes.samples,
            self.unit,
            sizes.tokens * 8,  # 4 bytes a token id and about as many of text, uncompressed
            (sizes.source, rate.source if rate else NO_RATE, *self.loading()),
            sizes.tokens / rate.tokens / 3600 if rate else None,
        )

    def prepare(self) -> list[Check]:
        checks = [
            check("prompts", self._prompts_read),
            check("target", self._target_found),
        ]
        if all(item.passed for item in checks):
            checks.append(check("prompts fit the context", self._prompts_fit))
        if self.config.generate.engine == "endpoint":
            checks.append(check("endpoint", self._endpoint_answers))
        return checks

    def run(self, progress: Progress) -> None:
        if self.workspace.part:
            return  # what is frozen stays as it is
        self.store.recover()
        wanted = {prompt.id for prompt in self.prompts}
        self.store.quarantine(self.store.faults(wanted, Inspection(progress=progress)))
        done = self.store.conversations()
        progress.begin(len(self.prompts), self.unit, len(done))
        if done >= wanted:
            return
        writer = SampleWriter(self.store)
        try:
            if self.config.generate.engine == "reference":
                self._by_reference_engine(done, writer, progress)
            else:
                asyncio.run(self._by_endpoint(done, writer, progress))
        finally:
            writer.close()

    def inspect(self, inspection: Inspection) -> Verdict:
        wanted = [prompt.id for prompt in self.prompts]
        findings = self.store.faults(wanted, inspection)
        sound = self.store.conversations(without=findings.damaged)
        problems = []
        if not findings.missing and not any(row["sample_ids"] for row in self.store.rows()):
            problems.append(f"no usable answer; rejected: {dict(self.store.rejected())}")
        return self.verdict(
            inspection, len(wanted), len(sound.intersection(wanted)), findings, problems
        )

    def content(self) -> str:
        return self.store.digest()

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, as the target's chat template renders it."""
        return self.target.render(prompt.messages)

    def _by_reference_engine(
        self, done: set[str], writer: SampleWriter, progress: Progress
    ) -> None:
        """Decode part by part. Parts are cut from the whole list, so a resumed run decodes the
        same batches and writes the same answers."""
        from draftworks.engines.reference import ReferenceEngine

        progress.phase("loading target")
        engine = ReferenceEngine(self.target, self.target.auxiliary_layers(None))
        progress.phase("generating")
        settings = self.config.generate
        encoded = {prompt.id: self.encode(prompt) for prompt in self.prompts}
        # Prompts of like length share a part, which leaves little padding.
        ordered = sorted(encoded, key=lambda name: (-len(encoded[name]), name))
        seen = {name for row in self.store.rows() for name in row["sample_ids"]}
        for start in range(0, len(ordered), settings.part_size):
            names = ordered[start : start + settings.part_size]
            if done.issuperset(names):
                continue
            progress.check_stop()
            completions = engine.generate(
                [encoded[name] for name in names],
                settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seeds=[int(digest([settings.seed, name]), 16) % 2**63 for name in names],
            )
            results = [
                self._judge(
                    name,
                    encoded[name],
                    item.tokens,
                    self.target.text(item.tokens),
                    item.finish_reason,
                )
                for name, item in zip(names, completions, strict=True)
            ]
            self._commit(results, seen, writer, progress)

    async def _by_endpoint(self, done: set[str], writer: SampleWriter, progress: Progress) -> None:
        """Ask the server; commit a part whenever enough answers have come in, in any order."""
        progress.phase("generating")
        settings = self.config.generate
        todo = (prompt for prompt in self.prompts if prompt.id not in done)
        seen = {name for row in self.store.rows() for name in row["sample_ids"]}
        pending: list[Sample | Rejected] = []
        try:
            async with aclosing(answers(todo, settings, self.config.target.model)) as stream:
                async for prompt, answer in stream:
                    pending.append(
                        answer
                        if isinstance(answer, Rejected)
                        else self._from_answer(prompt, answer)
                    )
                    if len(pending) >= settings.part_size:
                        part, pending = pending, []
                        self._commit(part, seen, writer, progress)
                        self._require_usable(seen)
                        progress.check_stop()
        finally:
            # What has been answered is paid for: keep it whatever ends the loop.
            if pending:
                self._commit(pending, seen, writer, progress)

    def _require_usable(self, seen: set[str]) -> None:
        """Raises DraftworksError when not one answer so far can be used, rather than asking for
        the rest in vain."""
        if not seen:
            raise DraftworksError(
                f"generate: none of the first {len(self.store.conversations()):,} answers can be "
                f"used: {dict(self.store.rejected())}. Look at the server and its settings, then "
                f"remove {self.directory} and start again."
            )

    def _from_answer(self, prompt: Prompt, answer: Answer) -> Sample | Rejected:
        """Token ids of a served answer: the server's own where it tells them, otherwise prompt
        and answer tokenised apart, as an engine does it, and held against the text."""
        if answer.prompt_ids is not None and answer.token_ids is not None:
            return self._judge(
                prompt.id,
                list(answer.prompt_ids),
                answer.token_ids,
                answer.text,
                answer.finish_reason,
            )
        tokenizer = self.target.tokenizer
        prompt_ids = self.encode(prompt)
        text = answer.text
        opening = self.config.generate.reasoning_open
        if self.target.text(prompt_ids[-8:], special=True).rstrip().endswith(opening):
            # The template has opened the reasoning already.
            text = text.removeprefix(opening)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if self.target.text(ids, special=True) != text:
            return Rejected(prompt.id, "tokenisation does not give the text back")
        if answer.finish_reason == "stop" and tokenizer.eos_token_id is not None:
            ids.append(int(tokenizer.eos_token_id))
        return self._judge(prompt.id, prompt_ids, tuple(ids), text, answer.finish_reason)

    def _judge(
        self,
        conversation: str,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        text: str,
        finish_reason: str,
    ) -> Sample | Rejected:
        """A sample, or the reason why the answer is not worth learning from."""
        stripped = text.strip()
        if not stripped:
            return Rejected(conversation, "empty")
        if len(stripped) > 8 and len(set(stripped)) == 1:
            return Rejected(conversation, "repetition")
        if finish_reason == "length" and not self.config.generate.keep_truncated:
            return Rejected(conversation, "truncated")
        ids = (*prompt_ids, *answer_ids)
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            return Rejected(conversation, "token ids that the target does not have")
        return Sample(conversation, ids, len(prompt_ids), finish_reason, text)

    def _commit(
        self,
        results: Sequence[Sample | Rejected],
        seen: set[str],
        writer: SampleWriter,
        progress: Progress,
    ) -> None:
        """Write one part. Two prompts that render to the same tokens make one sample."""
        samples: list[Sample] = []
        rejected = [item for item in results if isinstance(item, Rejected)]
        for item in results:
            if isinstance(item, Sample):
                if item.id in seen:
                    rejected.append(Rejected(item.conversation_id, "duplicate"))
                else:
                    seen.add(item.id)
                    samples.append(item)
        writer.commit(samples, rejected)
        progress.advance(len(results))

    @property
    def _room(self) -> int:
        """Tokens that a prompt may have beside the longest answer."""
        return self.target.context - self.config.generate.max_new_tokens

    def _prompts_read(self) -> str:
        path = prompts_file(self.config.prompts)
        return f"{len(read_prompts(self.config.prompts)):,} prompts in {path.name}"

    def _target_found(self) -> str:
        target = self.target
        target.auxiliary_layers(self.config.extract.layers)
        if "reference" in (self.config.generate.engine, self.config.extract.engine):
            target.require_all_weights()
        return f"{target.layers} layers, vocabulary {target.vocab_size:,}, {target.folder}"

    def _prompts_fit(self) -> str:
        if self._room < 1:
            raise DraftworksError(
                f"generate.max_new_tokens {self.config.generate.max_new_tokens:,} leaves no room "
                f"for a prompt in the context of {self.target.context:,}"
            )
        lengths = {prompt.origin: len(self.encode(prompt)) for prompt in self.prompts}
        if not lengths:
            raise DraftworksError("no prompt fits the context")
        origin = max(lengths, key=lambda name: lengths[name])
        if (longest := lengths[origin]) > self._room:
            raise DraftworksError(
                f"prompts {origin}: {longest:,} tokens and generate.max_new_tokens "
                f"{self.config.generate.max_new_tokens:,} exceed the context of "
                f"{self.target.context:,}. Shorten or remove it, or set prompts.skip_too_long."
            )
        return f"longest has {longest:,} tokens, room for {self._room:,}"

    def _endpoint_answers(self) -> str:
        asyncio.run(probe(self.config.generate, self.config.target.model))
        return f"{self.config.generate.endpoint.base_url} serves the model"
