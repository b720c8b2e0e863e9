"""The model class behind ``--model evalkit``: any lm-eval task, prefilled by a sparse method.

What a request conditions on is prefilled by the method; what it generates or scores after that is decoded densely, as
in a run of the harness. For ``loglikelihood_rolling`` the scored text is itself the prompt. Nothing is truncated: a
request that the model cannot hold is refused before the first one runs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from ..attention import Session
from ..benchmarks.longbench_v2 import second, two_stage
from ..benchmarks.perplexity import ids_sha256
from ..errors import InputError, IntegrityError
from ..generation import Decoding, Generated, generate
from ..identity import cell_identity, provenance
from ..lm import end_tokens
from ..models.loading import load_model, load_tokenizer, locate, resolve_device, resolve_dtype
from ..prompts import PromptRenderer
from ..reference import score_window
from ..runner import _backend
from ..task_settings import Sampling
from . import budget, metadata
from .budget import Chain, LogLikelihood, Rolling, Text
from .settings import settings

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
IGNORED = ("num_beams", "use_cache")
"""Arguments of a generation that change nothing here at their usual values."""


@dataclass(frozen=True)
class _Generation:
    """A generation request, checked.

    Attributes:
        args: as lm-eval keyed it, for its cache.
        ids: the prompt.
        stop: texts that end the answer.
        limit: longest answer, tokens.
        sampling: None for greedy.
        second: what the answer is asked for with after a chain of thought; None for a request of one stage.
        stream: what tells the request from all others of its prompt: its document, and how often that came before.
    """

    args: tuple[Any, ...]
    ids: list[int]
    stop: list[str]
    limit: int
    sampling: Sampling | None
    second: dict[str, Any] | None = None
    stream: tuple[Any, ...] = ()


class SparsePrefillLM(TemplateLM):
    """lm-eval's view of a model under a sparse-prefill method.

    Args:
        batch_size, max_batch_size, device, trust_remote_code: passed by lm-eval.
        arguments: see :func:`.settings.settings`.

    Raises:
        InputError, MissingAsset: an argument cannot be used; the message names it.
    """

    two_stages = True
    """Asks the second stage of a chain of thought, see :mod:`~evalkit.benchmarks.longbench_v2.two_stage`."""

    def __init__(
        self,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        trust_remote_code: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.settings = settings({**arguments, "batch_size": batch_size, "device": device})
        cell = self.settings.cell
        if cell.execution.threads is not None:
            torch.set_num_threads(cell.execution.threads)
        self._device = resolve_device(cell.execution.device)
        dtype = resolve_dtype(cell.model.dtype, self._device)
        backend = _backend(cell.execution.backend, self._device, dtype)
        source = locate(cell.model)
        self.tokenizer: Any = load_tokenizer(source, cell.model)
        chat = bool(self.tokenizer.chat_template)
        self._renderers = {False: PromptRenderer(self.tokenizer, chat=False)}
        if chat:
            self._renderers[True] = PromptRenderer(self.tokenizer, chat=True, thinking=cell.model.thinking)
        data = {"weights": source.checksum, "prompt": self._renderers[chat].fingerprint}
        self.identity = {
            **cell_identity(cell, device=self._device, dtype=dtype, backend=backend, data=data),
            "requests": self.settings.requests,
        }
        self.loaded = load_model(cell.model, source, cell.task.length, self._device, dtype)
        self.session = Session(
            self.loaded.model,
            cell.method,  # type: ignore[arg-type]
            backend=cell.execution.backend,
            page_size=cell.execution.page_size,
            page_shuffle=cell.execution.page_shuffle,
            chunk_size=cell.execution.chunk_size,
        )
        self.session.__enter__()
        self.eos = end_tokens(self.session)
        self._totals: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for look in (budget.install, metadata.install):
            look(lambda lm: isinstance(lm, SparsePrefillLM))

    def close(self) -> None:
        """Give the model its own attention back."""
        self.session.__exit__(None, None, None)

    # ------------------------------------------------------------------------------------------------ what lm-eval asks
    @property
    def max_length(self) -> int:
        """Longest prompt plus output, tokens."""
        return self.settings.cell.task.length

    @property
    def max_gen_toks(self) -> int:
        """Output tokens of a request that names no number."""
        return self.settings.max_gen_toks

    @property
    def batch_size(self) -> int:
        """One sequence a call."""
        return 1

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text with no context starts from: BOS, or the end of text where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's prompt cache."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation; without a generation prompt its last message is continued."""
        thinking = self.settings.cell.model.thinking
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **({} if thinking is None else {"enable_thinking": thinking}),
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that starts with the prefix token gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = self.settings.add_bos_token
            if string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        asked = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        # verbose=False: prompts beyond the tokenizer's own idea of a maximum are checked here.
        return list(self.tokenizer(string, verbose=False, **asked).input_ids)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Keep this model's answers apart in lm-eval's response cache.

        lm-eval keys a response by the request alone. Every key that passes through this connection gets the hash of
        all that can change a number here in front, so one file may hold many methods and models.
        """
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            digest = self.identity_hash
            cache_hook.dbdict.encode_key = lambda key: f"{digest}:{key}"

    @property
    def identity_hash(self) -> str:
        """Hash of everything that can change an answer."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True, default=str).encode()).hexdigest()

    def get_model_info(self) -> dict[str, Any]:
        """For ``config`` of the results file: settings, identity and what the prefills cost in all.

        Answers out of the response cache cost no prefill here and are not in ``prefills``.
        """
        model = self.loaded.model
        return {
            "model_num_parameters": model.num_parameters(),
            "model_dtype": str(model.dtype),
            "model_revision": self.settings.cell.model.revision or "",
            "model_sha": self.identity["data"]["weights"],
            "evalkit": {
                "identity": self.identity,
                "identity_sha256": self.identity_hash,
                "rope": self.loaded.rope,
                "provenance": provenance(self.device),
                "prefills": {name: _total(parts) for name, parts in self._totals.items()},
            },
        }

    # --------------------------------------------------------------------------------------------------- log-likelihood
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; those of one context that follow each other share its prefill."""
        for (context, _), prompt, rest in requests:
            self._fits(len(prompt) + len(rest) - 1, context)
        results: list[tuple[float, bool]] = []
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        for prompt_ids, members in groupby(requests, key=lambda request: request[1]):
            group = list(members)
            longest = max(len(rest) for _, _, rest in group)
            last, account = self._prefill("loglikelihood", prompt_ids, reserve=longest - 1)
            for args, _, rest in group:
                found = LogLikelihood(self._continuation(last, rest), [account])
                self.cache_hook.add_partial("loglikelihood", args, found)
                results.append(found)
                bar.update(1)
            self.session.account()
        bar.close()
        return results

    @torch.inference_mode()
    def _continuation(self, last: Tensor, rest: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of ``rest`` after the prefilled context, which is left as it was."""
        targets = torch.tensor(rest, device=last.device)
        states = last
        if len(rest) > 1:
            states = torch.cat([last, self.session.extend(targets[:-1])])
            self.session.rewind(len(rest) - 1)
        log_p = _finite(self.session.logits(states)).log_softmax(-1)
        total = float(log_p.gather(1, targets[:, None]).sum())
        return total, bool((log_p.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in lm-eval's disjoint windows; each window is a prompt of its own."""
        results: list[float] = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            total, accounts = 0.0, []
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, predicted in map(utils.make_disjoint_window, windows):
                ids = [*context, *predicted]
                states, account = self._prefill("loglikelihood_rolling", ids[:-1], keep_from=len(context) - 1)
                self.session.account()
                nll, _, _ = score_window(self.session, states, torch.tensor(predicted, device=states.device), None)
                total -= nll
                accounts.append(account)
            found = Rolling(total, accounts)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found)
            results.append(found)
        return results

    # ------------------------------------------------------------------------------------------------------- generation
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts; every request is checked before the first one runs."""
        # lm-eval repeats a document by sending its request again: the k-th time draws from a stream of its own.
        seen: Counter[tuple[Any, ...]] = Counter()
        prepared = []
        for request in requests:
            document = (request.task_name, request.doc_id, request.idx)
            prepared.append(self._generation(request, (request.doc_id, request.idx, seen[document])))
            seen[document] += 1
        results: list[str] = []
        for item in tqdm(prepared, disable=disable_tqdm, desc="Running generate_until requests"):
            found = self._generate(item) if item.second is None else self._chain(item, item.second)
            if item.sampling is None:  # a key of the cache does not tell the draws of one request apart
                self.cache_hook.add_partial("generate_until", item.args, found)
            results.append(found)
        return results

    def _generation(self, request: Instance, stream: tuple[Any, ...]) -> _Generation:
        context, asked = request.args
        arguments: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        stop = handle_stop_sequences(arguments.pop("until", None), eos=self.tokenizer.decode(self.eot_token_id))
        limit, sampled = int(arguments.pop("max_gen_toks")), bool(arguments.pop("do_sample", False))
        chosen = {name: arguments.pop(name) for name in SAMPLING if name in arguments}
        then = arguments.pop(two_stage.ARGUMENT, None)
        if then is not None:
            self._check_chain(self._renderers[then["chat"]])
        for name, value in arguments.items():
            if name not in IGNORED or value not in (1, True):
                known = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
                raise InputError(f"gen_kwargs.{name}", value, f"not supported; known: {known}")
        sampling = None
        if sampled:
            self._check_uncached(asked)
            numbers = {name: int(value) if name == "top_k" else float(value) for name, value in chosen.items()}
            sampling = Sampling(**numbers)  # type: ignore[arg-type]
            sampling.validate("gen_kwargs")
        ids = self.tok_encode(context)
        self._fits(len(ids) + limit, context)
        return _Generation(request.args, ids, stop, limit, sampling, then, stream)

    def _check_uncached(self, asked: dict[str, Any]) -> None:
        """lm-eval keeps sampled requests out of its response cache, and knows them by ``do_sample`` alone."""
        if self.cache_hook.dbdict is not None and not asked.get("do_sample"):
            allowed = (
                "true where a temperature asks for sampling: with --use_cache lm-eval takes the request for a greedy "
                "one and would answer every repeat with one draw"
            )
            raise InputError("gen_kwargs.do_sample", asked.get("do_sample"), allowed)

    def _generate(self, item: _Generation) -> Text:
        hidden, account = self._prefill("generate_until", item.ids, reserve=item.limit)
        pick = Decoding(item.sampling, self.settings.seed).picker(account["sha256"], *item.stream)
        ended = self._stops(item.stop)
        output: list[int] = []
        while True:
            token = pick(self._next_logits(hidden))
            if token in self.eos:
                break
            output.append(token)
            if len(output) == item.limit or ended(output):
                break
            hidden = self.session.decode(token)
        self.session.account()
        return Text(postprocess_generated_text(self._answer(output), item.stop, None), [account])

    def _answer(self, output: list[int]) -> str:
        """Text after the think block; a block that does not close leaves no answer, as in a run of the harness."""

        def text(ids: list[int], skip: bool = True) -> str:
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip))

        end = self.settings.think_end_token
        if end is None:
            return text(output)
        _, closed, answer = text(output).partition(end)
        if closed:
            return answer.lstrip()
        if end in text(output, skip=False):  # a special token, which the text above lacks
            start = next(n for n in range(1, len(output) + 1) if end in text(output[:n], skip=False))
            return text(output[start:]).lstrip()
        return text(output) if self.settings.cell.model.thinking is False else ""

    def _check_chain(self, renderer: PromptRenderer) -> None:
        """A model that thinks reasons by itself, in one stage."""
        thinking, end = self.settings.cell.model.thinking, self.settings.think_end_token
        if thinking or (thinking is None and renderer.switchable):
            raise InputError(
                "enable_thinking", thinking, "false for a chain of two stages; else the model thinks first"
            )
        if end is not None:
            raise InputError("think_end_token", end, "null for a chain of two stages, where nothing is thought")

    def _chain(self, item: _Generation, asked: dict[str, Any]) -> Chain:
        """The first stage as any request, then the second, dense and in no budget."""
        first = self._generate(item)
        limit = min(item.limit, int(asked["max_gen_toks"]))
        decoding = Decoding(item.sampling, self.settings.seed)
        pick = decoding.picker(first.prefills[0]["sha256"], *item.stream, "second stage")

        def answer(dense: Session, hidden: Tensor) -> Generated:
            return generate(
                dense,
                hidden,
                next_logits=self._next_logits,
                pick=pick,
                limit=limit,
                eos=self.eos,
                tokenizer=self.tokenizer,
                thinking_tokens=None,
            )

        reasoning = first.strip()
        question = two_stage.question_of(asked)
        found = second.conclude(
            self.loaded.model,
            question,
            reasoning,
            self._renderers[asked["chat"]],
            encode=self.tok_encode,
            fits=lambda tokens: self._fits(tokens, f"second stage: {question.question}"),
            generate=answer,
            limit=limit,
        )
        return Chain(reasoning, "" if found is None else found.answer.text, first.prefills)

    def _next_logits(self, hidden: Tensor) -> Tensor:
        return _finite(self.session.logits(hidden[-1:]))[0]

    def _stops(self, stop: Sequence[str]) -> Callable[[list[int]], bool]:
        """Whether the tail of the output holds a stop text, that of a think block aside."""
        texts = [text for text in stop if text]
        window = max((len(self.tokenizer(text, add_special_tokens=False).input_ids) for text in texts), default=0) + 2
        end = self.settings.think_end_token
        thinking = end is not None and self.settings.cell.model.thinking is not False

        def ended(output: list[int]) -> bool:
            nonlocal thinking
            if thinking:
                thinking = str(end) not in self.tokenizer.decode(output)
                return False
            tail = self.tokenizer.decode(output[-window:])
            return any(text in tail for text in texts)

        return ended

    # ---------------------------------------------------------------------------------------------------------- prefill
    def _prefill(
        self, kind: str, ids: Sequence[int], *, keep_from: int | None = None, reserve: int = 0
    ) -> tuple[Tensor, dict[str, Any]]:
        """Prefill a prompt; its kept hidden states and the account of it."""
        begin = time.perf_counter()
        keep = len(ids) - 1 if keep_from is None else keep_from
        states = self.session.prefill(torch.tensor(ids), keep_from=keep, reserve=reserve)
        found = self.session.account()
        account = {
            "sha256": ids_sha256(list(ids)),
            "tokens": len(ids),
            "budget": found.budget.record(),
            "backends": found.backends,
            "seconds": time.perf_counter() - begin,
            "warnings": [*self.session.method.warnings(len(ids)), *found.warnings],
        }
        self._totals[kind].append(
            {name: account[name] for name in ("tokens", "budget", "backends", "seconds", "warnings")}
        )
        return states, account

    def _fits(self, tokens: int, text: str) -> None:
        if tokens > self.max_length:
            allowed = f"at least {tokens} for the request that starts {text[:60]!r}; nothing is truncated"
            raise InputError("max_length", self.max_length, allowed)


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise IntegrityError("the model produced logits that are not finite")
    return logits


def _total(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over prefills, and the budget as a ratio of them."""
    computed, dense = (sum(part["budget"][name] for part in parts) for name in ("computed", "dense"))
    backends: dict[str, int] = defaultdict(int)
    for part in parts:
        for name, calls in part["backends"].items():
            backends[name] += calls
    return {
        "count": len(parts),
        "tokens": sum(part["tokens"] for part in parts),
        "seconds": sum(part["seconds"] for part in parts),
        "B_pooled": computed / dense,
        "backends": dict(backends),
        "warnings": sorted({text for part in parts for text in part["warnings"]}),
    }
