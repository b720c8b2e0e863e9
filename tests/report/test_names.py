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


def test_series_tell_executions_of_one_method_apart(tmp_path):
    for execution, p in (("token", 0.5), ("token", 0.6), ("block", 0.5)):
        settings = synthetic.config("minference", p=p)
        settings["method"] |= {"execution": execution, "order": None}
        synthetic.write_cell(tmp_path, settings, synthetic.perplexity_records(share=0.4))
        if len(read_cells([tmp_path])) == 2:
            assert set(names.series_labels(read_cells([tmp_path])).values()) == {"minference"}, "nothing differs"
    assert sorted(names.series_labels(read_cells([tmp_path])).values()) == [
        "minference, block",
        "minference, token",
        "minference, token",
    ]
