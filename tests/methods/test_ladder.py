"""CoSA's ablation rows (Table 3): what each row's preset is, and the XAttention proxy inside CoSA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from kernel_cases import paged, tensors
from prefill_kernels import Capabilities, KapScores, kap_scores, select_blocks
from prefill_kernels.xattn import xattn_pairs, xattn_scores

from evalkit.app import schema, sweeper
from evalkit.config import cell_from_config
from evalkit.errors import InputError
from evalkit.methods import PlanContext
from evalkit.methods.cosa import CoSA, Select

ROWS = {  # preset: proxy, order, skip scale, forced blocks, then what is asked of the kernel
    "cosa-base": ("xattention", "ascending", -1.0, True, Capabilities(physical_skip=True)),
    "cosa-kap": ("kap", "ascending", -1.0, False, Capabilities(physical_skip=True)),
    "cosa-iks": ("kap", "ascending", 2000.0, False, Capabilities(physical_skip=True, in_kernel_skip=True)),
    "cosa-iks-descending": ("kap", "descending", 2000.0, False, Capabilities(physical_skip=True, in_kernel_skip=True)),
    "cosa-rmp": (
        "kap",
        "hrm_first",
        2000.0,
        False,
        Capabilities(physical_skip=True, in_kernel_skip=True, page_remap=True),
    ),
}


@pytest.fixture(scope="module")
def composed():
    schema.register()
    sweeper.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("evalkit.conf", version_base="1.3"):
        yield lambda *overrides: cell_from_config(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_ablation(composed, name):
    method = composed(f"method={name}", "task=ruler", "model=qwen3-8b").method
    proxy, order, skip_scale, forced, features = ROWS[name]
    want = CoSA(proxy=proxy, order=order, skip_scale=skip_scale, force_sink_diagonal=forced)
    assert method == want, "a row differs from the others in what its name says and in nothing else"
    assert method.features == features


def test_the_last_row_is_the_published_setting(composed):
    rows = [composed(f"method={n}", "task=ruler", "model=qwen3-8b").method for n in ("cosa-rmp", "cosa-qwen3-8b")]
    assert rows[0] == rows[1]


def inputs(length: int = 500):
    q, k, v = tensors(length, 6, 2, 16, block=64, seed=3, uneven=False)
    return q, paged(k, v, 32), PlanContext(0, 0, 700, 0.25, "torch")


def test_base_selects_by_the_antidiagonal_scores():
    q, kv, context = inputs()
    base = CoSA(block_size=64, proxy="xattention", order="ascending", select=Select(p=0.7), force_sink_diagonal=True)
    base.validate()
    plan = base.plan(q, kv, context)
    mass = xattn_scores(q, kv, stride=8, scale=0.25, block_size=64)
    shape = {"block_size": 64, "q_offset": 0, "q_len": 500, "prompt_len": 700}
    want = select_blocks(
        KapScores(mass, torch.zeros_like(mass, dtype=torch.bool)),
        p=0.7,
        order="ascending",
        force_sink_diagonal=True,
        **shape,
    )
    assert torch.equal(plan.order, want.order)
    other = select_blocks(
        kap_scores(q, kv, stride=8, scale=0.25, block_size=64),
        p=0.7,
        order="ascending",
        force_sink_diagonal=True,
        **shape,
    )
    assert not torch.equal(plan.order, other.order), "the proxy must make a difference"
    lists = plan.order[0, :, 2:]
    assert (lists[..., 0] == 0).all() and (lists.amax(-1) == torch.arange(2, 8)).all(), "sink and diagonal"


def test_the_proxy_costs_what_it_is():
    assert CoSA(proxy="xattention", order="ascending").estimator_cells(128, 500) == xattn_pairs(128, 500, 8)
    long = 16384
    assert CoSA(proxy="xattention", order="ascending").estimator_cells(0, long) / (long * (long + 1) / 2) == (
        pytest.approx(1 / 8, rel=0.01)
    )


def test_without_hrm_flags_there_is_no_hrm_first_order():
    base = CoSA(proxy="xattention", order="ascending", stride=8)
    base.validate()
    for change, field in (({"order": "hrm_first"}, "order"), ({"stride": 12}, "stride"), ({"proxy": "flex"}, "proxy")):
        with pytest.raises(InputError, match=f"method.{field}="):
            replace(base, **change).validate()
