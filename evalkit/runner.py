"""Run one cell: samples, model, evaluation, store. Called in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefill_kernels import resolve_backend
from prefill_kernels.backends import half_problem, hopper_problem
from transformers import PreTrainedTokenizerBase

from .attention import Session
from .benchmarks import longbench_v2, ruler
from .benchmarks.docs import perplexity_docs, ruler_docs
from .benchmarks.longbench_v2.tasks import light_docs
from .benchmarks.perplexity import Windows, build_windows
from .calibration.disjoint import Guard
from .calibration.resolve import calibrated, check_weights
from .config import Cell, LongBenchV2Config, PerplexityConfig, RulerConfig, table_named
from .corpora import Corpora
from .errors import InputError, IntegrityError
from .generation import Decoding
from .identity import cell_identity, named_files, provenance
from .lm import EvalkitLM, ProgressLines
from .models.loading import (
    Source,
    check_shape,
    load_config,
    load_model,
    load_tokenizer,
    locate,
    resolve_device,
    resolve_dtype,
)
from .precision import LEAST_SCORES, LEAST_WINDOWS, Look, enough, half_width, schedule
from .prompts import PromptRenderer
from .reference import DenseReference
from .store import CELLS, CellStore, SampleKey, cell_key, twin_key


@dataclass(frozen=True)
class Prepared:
    """A cell's samples and the lm-eval tasks that read them.

    Attributes:
        samples: RULER samples by task.
        windows: perplexity windows.
        questions: LongBench-v2 prompts.
        specs: lm-eval task configurations, one per (task, length).
        checksums: digests of the samples.
        count: number of samples.
    """

    samples: dict[str, Sequence[ruler.Sample]]
    windows: Windows | None
    specs: list[dict[str, Any]]
    checksums: dict[str, str]
    count: int
    questions: longbench_v2.PromptSet | None = None


def run_cell(cell: Cell, opened: Callable[[Path], None] = lambda path: None) -> None:
    """Run a cell to its end, or finish one that was interrupted; a finished cell is not run again.

    Args:
        cell: the cell.
        opened: told the cell's directory as soon as it is known.

    Raises:
        InputError, MissingAsset: a setting or a file is wrong; nothing was run.
        IntegrityError: the run does not prove what it should.
        StoreError: the cell's directory is damaged or in use.
    """
    cell.validate()
    cell = calibrated(cell)
    _seed(cell.execution.seed)
    if cell.execution.threads is not None:
        torch.set_num_threads(cell.execution.threads)
    unresolved = _unresolved(cell)
    try:
        resolved = _resolve(cell)
    except Exception as error:
        # What the cell would be called is not known yet: the failure is kept under its settings alone.
        with _open(cell, unresolved) as store:
            opened(store.path)
            store.fail(error)
        raise
    with _open(cell, resolved.identity, resolved.prepared.count, resolved.device) as store:
        opened(store.path)
        # The cell has its own directory now; an earlier failure to get this far is history.
        shutil.rmtree(cell.out / CELLS / cell_key(unresolved), ignore_errors=True)
        if store.done:
            print(f"    finished before: {store.path}", flush=True)
            return
        try:
            summary = _evaluate(cell, store, resolved)
        except BaseException as error:
            store.fail(error)
            raise
        store.finish(summary)


@dataclass(frozen=True)
class Resolved:
    """A cell with everything that is known before its model is loaded."""

    device: torch.device
    dtype: torch.dtype
    source: Source
    renderer: PromptRenderer
    prepared: Prepared
    identity: dict[str, Any]


def _resolve(cell: Cell) -> Resolved:
    device = resolve_device(cell.execution.device)
    dtype = resolve_dtype(cell.model.dtype, device)
    backend = _backend(cell.execution.backend, device, dtype)
    cell.method.check_device(device, dtype, cell.execution.backend, cell.execution.page_size)  # type: ignore[attr-defined]
    source = locate(cell.model)
    check_weights(cell, source.checksum)
    if table_named(cell.method) is not None:
        check_shape(cell.method, load_config(source, cell.model))
    tokenizer = load_tokenizer(source, cell.model)
    renderer = PromptRenderer(tokenizer, chat=cell.model.chat, thinking=cell.model.thinking)
    prepared = prepare(cell, tokenizer, renderer)
    _check_unseen(cell, prepared, renderer)
    data = {"weights": source.checksum, "prompt": renderer.fingerprint, **prepared.checksums}
    identity = cell_identity(cell, device=device, dtype=dtype, backend=backend, data=data)
    return Resolved(device, dtype, source, renderer, prepared, identity)


def _check_unseen(cell: Cell, prepared: Prepared, renderer: PromptRenderer) -> None:
    """Raise :class:`IntegrityError` where the method was fitted on a window or a prompt of the cell, before it runs.

    LongBench-v2's prompts depend on the model's own reasoning; they are checked as they come.
    """
    guard = Guard(named_files(cell.method).values())
    if not guard.known:
        return
    for index, ids in enumerate(prepared.windows.ids if prepared.windows else ()):
        guard(f"window {index}", ids)
    for samples in prepared.samples.values():
        for sample in samples:
            guard(f"{sample.task}[{sample.index}]", renderer.encode(sample.prompt))


def _backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend a cell runs with; one asked for by name must be able to run here."""
    problem = hopper_problem(device) if name == "hopper" else None
    if name in ("triton", "hopper"):
        problem = problem or half_problem(device, dtype)
    if problem is not None:
        raise InputError("execution.backend", name, f"auto or torch here: {problem}")
    return resolve_backend(name, device, dtype)


def _unresolved(cell: Cell) -> dict[str, Any]:
    settings = cell.as_dict()
    sections = {name: settings[name] for name in ("model", "method", "task", "execution")}
    return {**sections, "data": {}, "versions": {}, "device": {}}


def _open(
    cell: Cell, identity: dict[str, Any], expected: int | None = None, device: torch.device | None = None
) -> CellStore:
    return CellStore.open(
        cell.out,
        identity,
        label=cell.label,
        overrides=cell.overrides,
        cell_config={**cell.as_dict(), "provenance": provenance(device) if device else {}},
        expected_samples=expected,
    )


def prepare(cell: Cell, tokenizer: PreTrainedTokenizerBase, renderer: PromptRenderer) -> Prepared:
    """Build or read the cell's samples."""
    task = cell.task
    if isinstance(task, PerplexityConfig):
        windows = build_windows(task, tokenizer, bos=cell.model.perplexity_bos, corpora=Corpora())
        spec = _spec("perplexity/perplexity.yaml", "perplexity", task.length, perplexity_docs(windows))
        return Prepared({}, windows, [spec], {"samples": windows.checksum}, task.limit)
    if isinstance(task, LongBenchV2Config):
        questions = longbench_v2.load(task, renderer)
        yaml = f"longbench_v2/longbench_v2_{task.mode}.yaml"
        spec = _spec(yaml, questions.task, task.length, light_docs(questions))
        return Prepared({}, None, [spec], {"samples": questions.checksum}, len(questions), questions)
    assert isinstance(task, RulerConfig)
    corpora = Corpora(task.data.essays, task.data.squad, task.data.hotpotqa)
    samples: dict[str, Sequence[ruler.Sample]] = {}
    specs, checksums = [], {}
    for name in task.tasks:
        reserve = task.generation.max_new_tokens or ruler.task_spec(name).max_new_tokens
        loaded = ruler.load(
            name,
            task.length,
            task.limit,
            seed=task.seed,
            renderer=renderer,
            corpora=corpora,
            max_new_tokens=reserve + (task.generation.thinking_tokens or 0),
        )
        samples[name] = loaded
        checksums[f"samples/{name}"] = loaded.data_checksum
        specs.append(_spec(f"ruler/{name}.yaml", f"ruler_{name}", task.length, ruler_docs(loaded)))
    return Prepared(samples, None, specs, checksums, task.limit * len(task.tasks))


def _spec(yaml: str, name: str, length: int, docs: list[dict[str, Any]]) -> dict[str, Any]:
    """A YAML task of ours under the name of its length, with its documents."""
    from lm_eval.tasks._yaml_loader import load_yaml

    spec = load_yaml(str(files("evalkit.tasks") / yaml), resolve_func=True)
    return {**spec, "task": f"{name}_{length}", "metadata": {**spec["metadata"], "docs": docs}}


def _evaluate(cell: Cell, store: CellStore, resolved: Resolved) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    prepared = resolved.prepared
    loaded = load_model(cell.model, resolved.source, cell.task.length, resolved.device, resolved.dtype)
    session = Session(
        loaded.model,
        cell.method,  # type: ignore[arg-type]
        backend=cell.execution.backend,
        page_size=cell.execution.page_size,
        page_shuffle=cell.execution.page_shuffle,
        chunk_size=cell.execution.chunk_size,
    )
    fidelity = isinstance(cell.task, PerplexityConfig) and cell.task.fidelity
    reference = DenseReference(loaded.model, twin_key(resolved.identity)) if fidelity else None
    looks: list[Look] = []
    with session, _quiet_lm_eval():
        for number in _numbers(cell, prepared):
            specs, keys = _first(prepared.specs, number)
            lm = EvalkitLM(
                session,
                store,
                resolved.renderer,
                samples=prepared.samples,
                windows=prepared.windows,
                reference=reference,
                max_length=cell.model.max_length,
                report=ProgressLines(cell.label, len(keys)),
                guard=Guard(named_files(cell.method).values()),
                decoding=_decoding(cell),
                questions=prepared.questions,
            )
            # Samples of an earlier look, or of an earlier run, come from the store.
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=specs,
                task_manager=TaskManager(include_path=str(files("evalkit.tasks")), include_defaults=False),
                log_samples=False,
                bootstrap_iters=0,
                random_seed=cell.execution.seed,
                numpy_random_seed=cell.execution.seed,
                torch_random_seed=cell.execution.seed,
            )
            assert results is not None
            scores = {name: _plain_metrics(values) for name, values in results["results"].items()}
            records = [store.completed[key] for key in keys if key in store.completed]
            _check_scores(scores, records, len(keys))
            if cell.task.precision is None:
                break
            looks.append(Look(number, half_width(records)))
            print(f"    look at {number}: 95 % interval +-{looks[-1].half_width}", flush=True)
            if enough(looks[-1], cell.task.precision):
                break
    summary: dict[str, Any] = {"lm_eval": scores, "rope": loaded.rope}
    if cell.task.precision is not None:
        summary["looks"] = [look.record() for look in looks]
        store.expect(len(keys))
    return summary


def _numbers(cell: Cell, prepared: Prepared) -> list[int]:
    """How many samples of each task to run before each look; all of them at once without a wanted precision."""
    most = max(len(spec["metadata"]["docs"]) for spec in prepared.specs)
    if cell.task.precision is None:
        return [most]
    return schedule(most, LEAST_WINDOWS if isinstance(cell.task, PerplexityConfig) else LEAST_SCORES)


def _first(specs: Sequence[dict[str, Any]], number: int) -> tuple[list[dict[str, Any]], list[SampleKey]]:
    """Task configurations of the first ``number`` documents each, and the keys of those documents."""
    cut = [{**s, "metadata": {**s["metadata"], "docs": s["metadata"]["docs"][:number]}} for s in specs]
    docs = [doc for spec in cut for doc in spec["metadata"]["docs"]]
    return cut, [(doc["task"], int(doc["length"]), int(doc["index"])) for doc in docs]


def _decoding(cell: Cell) -> Decoding:
    if isinstance(cell.task, PerplexityConfig):
        return Decoding()
    generation = cell.task.generation
    return Decoding(generation.resolve(cell.model), generation.seed, generation.thinking_tokens)


def _plain_metrics(values: dict[str, Any]) -> dict[str, float]:
    return {
        key.split(",")[0]: float(value)
        for key, value in values.items()
        # NaN: a category that none of the questions is in.
        if isinstance(value, (int, float)) and value == value
        if "stderr" not in key and key.split(",")[0] != "sample_len"
    }


def _check_scores(scores: dict[str, dict[str, float]], records: list[dict[str, Any]], expected: int) -> None:
    """What lm-eval aggregated must be what the records say."""
    if len(records) != expected:
        raise IntegrityError(f"{len(records)} records for {expected} samples")
    for name, metrics in scores.items():
        own = [r for r in records if name in (f"ruler_{r['task']}_{r['length']}", f"{r['task']}_{r['length']}")]
        if "score" in metrics:
            mean = float(np.mean([r["metrics"]["score"] for r in own]))
            reported = metrics["score"]
        else:
            tokens = sum(r["metrics"]["tokens"] for r in own)
            mean = float(np.exp(sum(r["metrics"]["nll"] for r in own) / tokens))
            reported = metrics["perplexity"]
        if not np.isclose(mean, reported, rtol=1e-9):
            raise IntegrityError(f"{name}: lm-eval reports {reported}, the records give {mean}")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """lm-eval's notices and its bar for building requests are no news to the user."""
    from lm_eval import evaluator
    from lm_eval.api import task

    logger = logging.getLogger("lm_eval")
    level, bar, commit = logger.level, task.tqdm, evaluator.get_git_commit_hash
    logger.setLevel(logging.ERROR)
    task.tqdm = functools.partial(bar, disable=True)
    # Runs git in the user's directory, which complains where that is no repository.
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = bar
        evaluator.get_git_commit_hash = commit
