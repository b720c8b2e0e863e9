"""The model as lm-eval sees it: sparse prefill, dense decode, one record a sample.

Requests name their sample; its prompt comes from the prepared samples. A sample that the store already holds is not
run again, and one that finishes is on disk before the next begins.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from .attention import Session
from .benchmarks import ruler
from .benchmarks.longbench_v2 import PromptSet
from .benchmarks.longbench_v2.run import Answerer
from .benchmarks.perplexity import Windows, ids_sha256
from .benchmarks.ruler import Sample
from .errors import IntegrityError
from .generation import Decoding, generate
from .methods.dense import Dense
from .prompts import PromptRenderer
from .reference import DenseReference, score_window
from .store import CellStore

SampleKey = tuple[str, int, int]


class ScoredText(str):
    """Generated text that carries its sample's record."""

    record: dict[str, Any]

    def __new__(cls, text: str, record: dict[str, Any]) -> ScoredText:
        """Attach ``record`` to ``text``."""
        self = super().__new__(cls, text)
        self.record = record
        return self


class ScoredFloat(float):
    """Log-likelihood of a window that carries its record."""

    record: dict[str, Any]

    def __new__(cls, value: float, record: dict[str, Any]) -> ScoredFloat:
        """Attach ``record`` to ``value``."""
        self = super().__new__(cls, value)
        self.record = record
        return self


class EvalkitLM(LM):
    """One model under one method.

    Args:
        session: entered session.
        store: where records go.
        renderer: the model's prompt renderer (BOS and answer prefix checks).
        samples: prepared samples by task name.
        windows: perplexity windows, where the cell has them.
        reference: dense states for fidelity, or None.
        max_length: longest prompt plus output the model supports, tokens.
        report: called after each sample with (done, record).
        guard: called with each sample's name and token ids before it is run; raises where the method was fitted on it.
        decoding: how answers are generated.
        questions: LongBench-v2 prompts, where the cell has them.
    """

    def __init__(
        self,
        session: Session,
        store: CellStore,
        renderer: PromptRenderer,
        *,
        samples: Mapping[str, Sequence[Sample]],
        windows: Windows | None,
        reference: DenseReference | None,
        max_length: int,
        report: Callable[[int, dict[str, Any]], None],
        guard: Callable[[str, Sequence[int]], None] = lambda name, ids: None,
        decoding: Decoding = Decoding(),  # noqa: B008 - frozen
        questions: PromptSet | None = None,
    ) -> None:
        super().__init__()
        self.session, self.store, self.renderer = session, store, renderer
        self.samples, self.windows, self.reference = samples, windows, reference
        self.max_length, self.report, self.guard = max_length, report, guard
        self.decoding, self.questions = decoding, questions
        self.eos = end_tokens(session)
        self._done = 0

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer RULER and LongBench-v2 requests."""
        return [self._once(request, self._generate) for request in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of the scored tokens of perplexity windows."""
        return [self._once(request, self._window) for request in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of a continuation: its context is prefilled by the method, its tokens are fed one by one."""
        results = []
        for request in requests:
            if self._is_question(request.doc):
                results.append(self._choice(request))
                continue
            context, continuation = request.args
            ids = self.renderer.encode(context)
            rest = self.renderer.encode(context + continuation)[len(ids) :]
            self._fits(len(ids) + len(rest), request.task_name)
            hidden = self.session.prefill(torch.tensor(ids), keep_from=len(ids) - 1, reserve=len(rest))
            total, greedy = 0.0, True
            for i, token in enumerate(rest):
                log_p = self._next_logits(hidden).log_softmax(-1)
                total += float(log_p[token])
                greedy &= int(log_p.argmax()) == token
                if i + 1 < len(rest):
                    hidden = self.session.decode(token)
            self.session.account()
            results.append((total, greedy))
        return results

    def _is_question(self, doc: Any) -> bool:
        return self.questions is not None and isinstance(doc, Mapping) and doc.get("task") == self.questions.task

    def _choice(self, request: Instance) -> tuple[float, bool]:
        """One choice of a question whose four are read after one prefill."""
        record = self.store.completed.get((request.doc["task"], int(request.doc["length"]), int(request.doc["index"])))
        if record is None or request.idx == 0:
            record = self._once(request, self._generate).record
        value, greedy = record["choices"][request.args[1].strip()]
        return float(value), bool(greedy)

    def _once(self, request: Instance, run: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
        doc = request.doc
        if not isinstance(doc, Mapping) or not {"task", "length", "index"} <= doc.keys():
            raise IntegrityError(f"{request.task_name}: not a task of this harness")
        key: SampleKey = (doc["task"], int(doc["length"]), int(doc["index"]))
        record = self.store.completed.get(key)
        if record is None:
            record, frame = self._measured(doc, run)
            self.store.append(record, frame)
        self._done += 1
        self.report(self._done, record)
        if "nll" in record["metrics"]:
            return ScoredFloat(-record["metrics"]["nll"], record)
        return ScoredText(record["output"], record)

    def _measured(self, doc: Mapping[str, Any], run: Callable[[Mapping[str, Any]], dict[str, Any]]) -> tuple[Any, Any]:
        cuda = self.session.model.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        part = run(doc)
        account = self.session.account()
        total = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record = {
            "task": doc["task"],
            "length": int(doc["length"]),
            "index": int(doc["index"]),
            **part,
            "budget": account.budget.record(),
            "calls": account.calls,
            "backends": account.backends,
            "seconds": {"prefill": account.prefill_seconds, "total": total},
            "peak_bytes": int(peak),
            "warnings": [*self.session.method.warnings(part["prompt"]["tokens"]), *account.warnings],
        }
        return record, account.budget.frame()

    def _generate(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        if self.questions is not None and self._is_question(doc):
            answer = Answerer(
                self.session,
                self.renderer,
                self.questions,
                self.decoding,
                self.eos,
                self._next_logits,
                self._fits,
                guard=self.guard,
            )
            return answer(doc)
        sample = self.samples[doc["task"]][int(doc["index"])]
        ids = self.renderer.encode(sample.prompt)
        prompt = self._checked_prompt(sample, ids)
        self.guard(f"{sample.task}[{sample.index}]", ids)
        hidden = self.session.prefill(torch.tensor(ids), keep_from=len(ids) - 1, reserve=sample.max_new_tokens)
        first_token = self._first_token(sample, hidden)
        limit = sample.max_new_tokens - (self.decoding.thinking_tokens or 0)
        generated = generate(
            self.session,
            hidden,
            next_logits=self._next_logits,
            pick=self.decoding.picker(sample.task, sample.length, sample.index),
            limit=limit,
            eos=self.eos,
            tokenizer=self.renderer.tokenizer,
            thinking_tokens=self.decoding.thinking_tokens,
        )
        metrics = {"score": ruler.score(sample.metric, generated.text, sample.references)}
        if first_token is not None:
            metrics["first_token"] = first_token
        return {
            "metrics": metrics,
            "output": generated.text,
            "references": list(sample.references),
            "prompt": prompt,
            "generation": generated.record(self.decoding, limit),
        }

    def _first_token(self, sample: Sample, hidden: torch.Tensor) -> float | None:
        """Probability, right after prefill, of a first token that begins some reference.

        Dense decode repairs much of what a sparse prefill loses, so the answer's text is a blunt measure; this number
        is read before any token is generated. White space that the tokenizer puts before the answer is fed first and
        forgotten again. None where the answer does not start here: a model that thinks first.
        """
        if not self.renderer.keeps_prefix:
            return None
        tail = sample.prompt[-256:]
        known = self.renderer.encode(tail)
        gap = "" if tail[-1:].isspace() else " "
        lead: list[int] | None = None
        targets: set[int] = set()
        for reference in sample.references:
            ids = self.renderer.encode(tail + gap + reference)
            # A prompt that ends in a space is tokenised before the answer can join it: the answer stands alone then.
            rest = ids[len(known) :] if ids[: len(known)] == known else self.renderer.encode(reference)
            start = next((i for i, t in enumerate(rest) if self.renderer.tokenizer.decode([t]).strip()), None)
            if start is None or (lead is not None and rest[:start] != lead):
                continue
            lead = rest[:start]
            targets.add(rest[start])
        if lead is None:
            return None
        for token in lead:
            hidden = self.session.decode(token)
        self.session.rewind(len(lead))
        return float(self._next_logits(hidden).softmax(-1)[sorted(targets)].sum())

    def _window(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        assert self.windows is not None
        ids, start = self.windows.ids[int(doc["index"])], self.windows.starts[int(doc["index"])]
        tokens = torch.tensor(ids)
        sha256 = ids_sha256(ids)
        self._fits(len(ids), doc["task"])
        self.guard(f"window {doc['index']}", ids)
        states = self.session.prefill(tokens, keep_from=start - 1)
        reference = None
        if self.reference is not None:
            if isinstance(self.session.method, Dense):
                self.reference.keep(sha256, states)
            reference = self.reference.states(tokens, start - 1, sha256)[:-1]
        targets = tokens[start:].to(states.device)
        nll, kl, top1 = score_window(self.session, states[:-1], targets, reference)
        if not math.isfinite(nll):
            raise IntegrityError(f"window {doc['index']}: the loss is {nll}")
        metrics: dict[str, float] = {"nll": nll, "tokens": len(targets)}
        if kl is not None and top1 is not None:
            metrics |= {"kl": kl, "top1": top1}
        return {
            "metrics": metrics,
            "output": None,
            "references": [],
            "prompt": {
                "sha256": sha256,
                "tokens": len(ids),
                "leading_bos": self.renderer.leading_bos(ids),
                "truncated": False,
                "answer_prefix": None,
                "thinking": None,
            },
        }

    def _checked_prompt(self, sample: Sample, ids: list[int]) -> dict[str, Any]:
        name = f"{sample.task}[{sample.index}]"
        if len(ids) != sample.prompt_tokens:
            raise IntegrityError(f"{name}: prompt has {len(ids)} tokens, prepared with {sample.prompt_tokens}")
        if len(ids) + sample.max_new_tokens > sample.length:
            raise IntegrityError(f"{name}: {len(ids)} + {sample.max_new_tokens} tokens exceed length {sample.length}")
        self._fits(len(ids) + sample.max_new_tokens, name)
        leading = self.renderer.leading_bos(ids)
        if leading != self.renderer.expected_leading_bos:
            raise IntegrityError(f"{name}: {leading} leading BOS, expected {self.renderer.expected_leading_bos}")
        if not sample.prompt.endswith((sample.answer_prefix, sample.answer_prefix.rstrip())):
            raise IntegrityError(f"{name}: the prompt does not end with its answer prefix")
        return {
            "sha256": ids_sha256(ids),
            "tokens": len(ids),
            "leading_bos": leading,
            "truncated": False,
            "answer_prefix": bool(sample.answer_prefix),
            "thinking": self.renderer.thinking,
        }

    def _fits(self, tokens: int, name: str) -> None:
        if tokens > self.max_length:
            raise IntegrityError(f"{name}: {tokens} tokens, the model supports {self.max_length}; nothing is truncated")

    def _next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.session.logits(hidden[-1:])[0]
        if not bool(torch.isfinite(logits).all()):
            raise IntegrityError("the model produced logits that are not finite")
        return logits


def end_tokens(session: Session) -> set[int]:
    """Token ids that end a generation, from the model's generation config."""
    eos = session.model.generation_config.eos_token_id if session.model.generation_config else None
    eos = eos if eos is not None else session.model.config.eos_token_id
    if eos is None:
        return set()
    return set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}


class ProgressLines:
    """One line now and then: the first sample, then at most one every few seconds, and the last."""

    def __init__(self, label: str, total: int, seconds: float = 5.0) -> None:
        self.label, self.total, self.seconds = label, total, seconds
        self._begin = time.monotonic()
        self._last = -math.inf

    def __call__(self, done: int, record: Mapping[str, Any]) -> None:
        """Report a finished sample."""
        now = time.monotonic()
        if now - self._last < self.seconds and done != self.total:
            return
        self._last = now
        metrics = " ".join(f"{k}={v:.4g}" for k, v in record["metrics"].items() if k != "tokens")
        left = (now - self._begin) / done * (self.total - done)
        print(
            f"    {done}/{self.total} {record['task']}[{record['index']}] {metrics} "
            f"B={record['budget']['B']:.3f} (about {left:.0f} s left)",
            file=sys.stderr,
            flush=True,
        )
