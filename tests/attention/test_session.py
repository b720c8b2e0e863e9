"""The patch on the real model classes: identity, chunks, pages, phases, accounting."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch
from prefill_kernels import DensePlan, causal_plan
from prefill_kernels.backends import choose_backend
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evalkit.attention import ATTENTION_NAME, Session
from evalkit.errors import InputError, IntegrityError
from evalkit.methods import METHODS
from evalkit.methods.base import Method
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def build(kind: str = "qwen3", heads: int = 6, kv_heads: int = 2, **extra):
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(1)
    if kind != "qwen2":
        extra.setdefault("head_dim", 16)
    config = config_class(
        vocab_size=89,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.2,
        attn_implementation="sdpa",
        **extra,
    )
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a lost QK-norm must show
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(seed))


def logits(model, method, ids, **kw):
    with Session(model, method, **kw) as session:
        out = session.logits(session.prefill(ids, keep_from=0))
        return out, session.account()


@torch.inference_mode()
def eager(model, ids):
    model.set_attn_implementation("eager")
    out = model(ids[None]).logits[0]
    model.set_attn_implementation("sdpa")
    return out


SPARSE = CoSA(block_size=64, stride=4, select=Select(p=0.5), skip_scale=100.0)


def make(name, **knobs):
    return METHODS.get(name)(**knobs)


FULL = [  # one row a method: its 100 % setting
    Dense(),
    CoSA(block_size=64, select=Select(p=1.0)),
    CoSA(block_size=64, select=Select(p=1.0), proxy="xattention", order="descending"),
    make("blasst", block_size=64, skip_scale=-1.0, order="descending"),
    make("minference", adaptive_budget=1.0),
    make("oracle_topk", block_size=64, budget=1.0),
    make("random", block_size=64, budget=1.0),
    make("streaming", block_size=64, window_blocks=5),
    make("xattention", block_size=64, threshold=1.0),
    make("flexprefill", block_size=64, gamma=1.0, min_budget=64),
    make("flashprefill", block_size=64, alpha=0.0),
    make("spargeattn", block_size=64, tau=1.0, pv_threshold=None),
    make("pageweaver", page_size=16, top_k=19),
]


@pytest.mark.parametrize("kind,heads,kv_heads", [("llama", 6, 2), ("llama", 3, 3), ("qwen2", 8, 1), ("qwen3", 8, 2)])
@pytest.mark.parametrize("method", FULL, ids=lambda m: m.name)
def test_at_100_percent_the_logits_are_the_models_own(kind, heads, kv_heads, method):
    model = build(kind, heads, kv_heads)
    ids = prompt(301)
    got, account = logits(model, method, ids, page_size=32, page_shuffle=5)
    assert (got - eager(model, ids)).abs().max() <= 1e-4
    assert account.budget.record()["B"] == 1.0


def test_a_sparse_run_is_not_dense():
    model = build()
    ids = prompt(301)
    got, account = logits(model, SPARSE, ids)
    assert (got - eager(model, ids)).abs().max() > 1e-2
    record = account.budget.record()
    assert record["B"] <= record["B_stage1"] < 1
    assert account.calls == {"expected": 3, "sparse": 3, "dense": 0, "fallback": 0, "decode": 0}
    assert account.backends == {"proxy:torch": 3, "select:torch": 3, "torch": 3} and account.warnings == []
    cells = 3 * 6 * SPARSE.estimator_cells(0, 301)
    assert record["estimator"] == pytest.approx(cells / (2 * record["dense"])) and cells > 0
    assert record["B_cost"] == pytest.approx(
        (record["visited"] + record["computed"]) / (2 * record["dense"]) + record["estimator"]
    )


def test_a_stage_that_fell_back_is_counted_and_warned_of(monkeypatch):
    """As on a CUDA device whose GPU proxy refuses the stride: counted by what ran, one warning for all layers."""

    @dataclass(frozen=True)
    class Falls(CoSA):
        def plan(self, q, kv, context):
            refusals = {
                "hopper": lambda: "needs compute capability 9.0",
                "triton": lambda: f"stride={self.stride}, block_size=64: the stride must divide the block",
            }
            choose_backend("proxy", "auto", torch.device("cuda"), refusals)
            choose_backend("select", "auto", torch.device("cuda"), {"triton": lambda: None})
            return causal_plan(q.shape[1], block_size=64, q_offset=0, q_len=q.shape[2], prompt_len=context.prompt_len)

    warned = "proxy ran on a slower backend than triton: stride=12, block_size=64: the stride must divide the block"
    for best, expected in (("triton", [warned]), ("torch", [])):
        monkeypatch.setattr(
            "evalkit.attention.session.resolve_backend", lambda name, *on, best=best: best if on else name
        )
        _, account = logits(build(), Falls(block_size=64, stride=12), prompt(100))
        assert account.backends == {"proxy:torch": 3, "select:triton": 3, "torch": 3}
        assert account.warnings == expected


def test_the_modules_own_scaling_is_used():
    model = build()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.05
    ids = prompt(301)
    for method in (Dense(), CoSA(block_size=64, select=Select(p=1.0))):
        got, _ = logits(model, method, ids)
        assert (got - eager(model, ids)).abs().max() <= 1e-4


def test_threshold_and_offset_know_the_whole_prompt_in_every_chunk():
    seen = []

    @dataclass(frozen=True)
    class Watched(CoSA):
        def plan(self, q, kv, context):
            plan = super().plan(q, kv, context)
            seen.append((context.layer, plan.prompt_len, plan.q_offset, plan.kv_len))
            return plan

    with Session(build(), Watched(select=Select(p=0.5), skip_scale=50.0), chunk_size=128) as session:
        session.prefill(prompt(300), keep_from=299)
    assert seen == [(i, 300, start, min(start + 128, 300)) for start in (0, 128, 256) for i in range(3)]


@pytest.mark.parametrize(
    "method", [Dense(), SPARSE, CoSA(order="descending", select=Select(rule="budget", budget=0.4))]
)
@pytest.mark.parametrize("length", [128, 129, 300, 385])  # 129 and 385: the last chunk has one token
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_chunks_and_pages_change_nothing(method, length, kind):
    model = build(kind)
    ids = prompt(length)
    whole, account = logits(model, method, ids, page_size=256)
    for chunk, page, shuffle in ((128, 16, 3), (256, 64, None), (128, 256, 8)):
        parts, part_account = logits(model, method, ids, chunk_size=chunk, page_size=page, page_shuffle=shuffle)
        assert (parts - whole).abs().max() < 1e-4
        assert part_account.budget.record() == pytest.approx(account.budget.record())
        chunks = -(-length // chunk)
        assert part_account.calls["expected"] == 3 * chunks
        assert part_account.calls["decode"] == 0


def test_decode_is_dense_over_the_sparse_cache():
    model = build()
    ids = prompt(200)
    with Session(model, SPARSE, page_size=16, page_shuffle=2) as session:
        session.prefill(ids, keep_from=199, reserve=3)
        steps = [session.logits(session.decode(t))[0] for t in (5, 7, 9)]
        account = session.account()
    assert account.calls == {"expected": 12, "sparse": 3, "dense": 0, "fallback": 0, "decode": 9}
    # A dense prefill followed by the same decode is the model's own forward.
    with Session(model, Dense(), page_size=16, page_shuffle=2) as session:
        session.prefill(ids, keep_from=199, reserve=3)
        dense = [session.logits(session.decode(t))[0] for t in (5, 7, 9)]
    own = eager(model, torch.cat([ids, torch.tensor([5, 7, 9])]))[200:]
    for got, sparse, expected in zip(dense, steps, own, strict=True):
        assert (got - expected).abs().max() < 1e-4
        assert (sparse - expected).abs().max() > 1e-3


def test_rewinding_forgets_decoded_tokens_and_keeps_the_books():
    model = build()
    with Session(model, SPARSE, page_size=16) as session:
        session.prefill(prompt(200), keep_from=199, reserve=4)
        first = session.decode(5)
        session.decode(7)
        session.rewind(2)
        assert torch.equal(session.decode(5), first)
        assert session.account().calls["decode"] == 9
        with pytest.raises(ValueError, match="only decoded tokens"):
            session.rewind(2)


def test_keep_from_returns_the_tail_of_the_hidden_states():
    model = build()
    ids = prompt(300)
    with Session(model, SPARSE, chunk_size=128) as session:
        full = session.prefill(ids, keep_from=0)
        for start in (0, 1, 127, 128, 200, 299):
            assert torch.equal(session.prefill(ids, keep_from=start), full[start:])


def test_the_patch_is_undone_and_no_forward_replaced():
    model = build()
    attention = type(model.model.layers[0].self_attn)
    source = inspect.getsource(attention.forward)
    ids = prompt(150)
    before = eager(model, ids)
    with pytest.raises(RuntimeError, match="inside"), Session(model, SPARSE) as session:
        assert model.config._attn_implementation == ATTENTION_NAME
        session.prefill(ids, keep_from=149)
        assert type(model.model.layers[0].self_attn).forward is attention.forward
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"
    assert inspect.getsource(attention.forward) == source
    assert torch.equal(eager(model, ids), before)


def test_an_unaccounted_layer_fails_the_sample():
    model = build()
    with Session(model, SPARSE) as session:
        session.prefill(prompt(150), keep_from=149)
        session._calls.sparse[1] -= 1
        with pytest.raises(IntegrityError, match="layer 1: 0 prefill"):
            session.account()


def test_a_layer_that_leaves_the_patch_is_noticed(monkeypatch):
    """A layer whose attention is someone else's never calls the registered function."""
    model = build()
    layer = model.model.layers[2].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **kw: (torch.zeros_like(hidden_states), None))
    with Session(model, SPARSE) as session:
        session.prefill(prompt(150), keep_from=149)
        with pytest.raises(IntegrityError, match="layer 2: 0 prefill"):
            session.account()


def test_calls_outside_a_session_and_padded_batches_are_errors():
    model = build()
    with Session(model, SPARSE):
        with pytest.raises(IntegrityError, match="outside a Session"):
            model(prompt(20)[None])
        padded = torch.ones(2, 20, dtype=torch.long)
        padded[0, :3] = 0
        with pytest.raises(IntegrityError, match="padded batch"):
            model(prompt(20)[None].repeat(2, 1), attention_mask=padded)


def test_method_returning_dense_is_counted_as_fallback():
    class Shy(CoSA):
        def plan(self, q, kv, context):
            return DensePlan("fallback") if context.layer == 1 else super().plan(q, kv, context)

    model = build()
    ids = prompt(200)
    _, account = logits(model, Shy(block_size=64, select=Select(p=0.5)), ids)
    record = account.budget.record()
    assert account.calls["fallback"] == 1 and account.calls["sparse"] == 2
    assert record["fallback_share"] == pytest.approx(1 / 3)
    assert record["layer_max"] == 1.0 and record["layer_min"] < 1.0


def test_what_cannot_be_run_is_refused_by_name():
    mistral = MistralForCausalLM(
        MistralConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    with pytest.raises(InputError, match="model='mistral'.*llama, qwen2, qwen3"):
        Session(mistral, Dense())
    sliding = build("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(InputError, match="layer 1 is not"):
        Session(sliding, Dense())
    with pytest.raises(InputError, match=r"execution.chunk_size=100: a multiple of 128"):
        Session(build(), CoSA(), chunk_size=100)

    class LastQueries(CoSA):
        chunkable = False

    with pytest.raises(InputError, match="plans from the whole prompt"):
        Session(build(), LastQueries(), chunk_size=128)


def test_prompt_beyond_the_cache_is_an_error():
    with Session(build(), Dense()) as session:
        session.prefill(prompt(128), keep_from=127)
        with pytest.raises(ValueError, match="holds 128 tokens, 129 are needed"):
            session.decode(1)


def test_methods_are_abstract():
    with pytest.raises(TypeError):
        Method()  # type: ignore[abstract]
