"""Labels of methods in a report."""

from __future__ import annotations

import synthetic

from evalkit.report import names
from evalkit.store import read_cells


def test_knobs_that_end_alike_keep_what_is_before_them(tmp_path):
    for size, pages in ((16, 64), (32, 64), (32, 128)):
        settings = synthetic.config("pageweaver", page_size=pages)
        settings["method"] = {
            "name": "pageweaver",
            "page_size": size,
            "top_k": 5,
            "gather": {"p": 1},
            "select": {"p": 1},
        }
        settings["method"]["select"]["p"] = size
        synthetic.write_cell(tmp_path, settings, synthetic.perplexity_records(share=0.4))
    assert sorted(names.method_labels(read_cells([tmp_path])).values()) == [
        "pageweaver method.page_size=16 select.p=16 execution.page_size=64",
        "pageweaver method.page_size=32 select.p=32 execution.page_size=128",
        "pageweaver method.page_size=32 select.p=32 execution.page_size=64",
    ]
