import dataclasses
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from evalkit.app import schema, sweeper
from evalkit.config import (
    Cell,
    ExecutionConfig,
    GenerationConfig,
    LongBenchV2Config,
    ModelConfig,
    PackageRef,
    PerplexityConfig,
    RopeConfig,
    RulerConfig,
    build,
    cell_from_config,
    cell_from_mapping,
    methods_registry,
    unwrap_optional,
)
from evalkit.errors import InputError

CONF = Path(__file__).parents[1] / "conf"


def model(**changes):
    return ModelConfig(**{"name": "toy", "path": "owner/toy", "native_context": 4096, **changes})


def yarn(**changes):
    return RopeConfig(**{"type": "yarn", "original": 32768, **changes})


BY_LENGTH = yarn(factors={32768: 1.0, 65536: 2.0, 131072: 4.0})


def refused(obj, field, *validate):
    with pytest.raises(InputError) as stop:
        obj.validate(*validate)
    assert stop.value.field == field
    assert "\n" not in str(stop.value)
    return stop.value


# ----------------------------------------------------------------------------------------------------------- model
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "model.name"),
        ({"dtype": "float8"}, "model.dtype"),
        ({"native_context": 0}, "model.native_context"),
        ({"path": None}, "model.path"),
        ({"path": "./nowhere"}, "model.path"),
        ({"chat": False, "thinking": True}, "model.thinking"),
        ({"package": PackageRef("p", "1", "0" * 64, "m")}, "model.path"),
        ({"path": None, "package": PackageRef("p", "1", "xyz", "m")}, "model.package.sha256"),
        ({"path": None, "package": PackageRef("p", "", "0" * 64, "m")}, "model.package.version"),
        ({"rope": RopeConfig(type="linear")}, "model.rope.type"),
        ({"rope": RopeConfig(factors={8192: 2.0})}, "model.rope.factors"),
        ({"rope": RopeConfig(static_factor=2.0)}, "model.rope.static_factor"),
        ({"rope": yarn()}, "model.rope.factors"),
        ({"rope": yarn(original=0, factors={8: 1.0})}, "model.rope.original"),
        ({"rope": yarn(factors={65536: 1.5})}, "model.rope.factors"),
        ({"rope": yarn(factors={32768: 0.5})}, "model.rope.factors"),
        ({"rope": yarn(static_factor=0.5)}, "model.rope.static_factor"),
        ({"rope": yarn(static_factor=float("nan"))}, "model.rope.static_factor"),
    ],
)
def test_model_refuses(changes, field):
    refused(model(**changes), field)


@pytest.mark.parametrize(
    ("length", "factor"), [(1, 1.0), (32768, 1.0), (32769, 2.0), (65536, 2.0), (65537, 4.0), (131072, 4.0)]
)
def test_yarn_factor_follows_the_length(length, factor):
    assert model(native_context=32768, rope=BY_LENGTH).rope_factor(length) == factor


def test_static_factor_holds_at_every_length_and_replaces_the_table():
    config = model(native_context=32768, rope=dataclasses.replace(BY_LENGTH, static_factor=2.0))
    config.validate()
    assert config.rope_factor(100) == 2.0
    assert config.max_length == 65536
    with pytest.raises(InputError, match=r"task\.length=65537: model toy supports at most 65536 with yarn scaling"):
        config.rope_factor(65537)


def test_length_beyond_the_native_context_names_the_maximum():
    assert model().rope_factor(4096) == 1.0
    with pytest.raises(InputError, match=r"task\.length=4097: model toy supports at most 4096 without RoPE scaling"):
        model().rope_factor(4097)


# ------------------------------------------------------------------------------------------------- task, execution
@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RulerConfig(tasks=()), "task.tasks"),
        (RulerConfig(tasks=("vt", "niah")), "task.tasks"),
        (RulerConfig(tasks=("vt", "vt")), "task.tasks"),
        (RulerConfig(tasks=("vt",), length=100), "task.length"),
        (RulerConfig(tasks=("vt",), limit=0), "task.limit"),
        (RulerConfig(tasks=("vt",), seed=-1), "task.seed"),
        (PerplexityConfig(corpus="essay"), "task.corpus"),
        (PerplexityConfig(corpus="book.txt"), "task.corpus"),
        (PerplexityConfig(corpus="./book"), "task.corpus"),
        (PerplexityConfig(corpus="folder/book.jsonl"), "task.corpus"),
        (PerplexityConfig(split=""), "task.split"),
        (PerplexityConfig(windows="frist"), "task.windows"),
        (PerplexityConfig(seed=-1), "task.seed"),
        (PerplexityConfig(text_field=""), "task.text_field"),
        (PerplexityConfig(length=8), "task.length"),
        (PerplexityConfig(limit=0), "task.limit"),
        (PerplexityConfig(score="last"), "task.score"),
        (LongBenchV2Config(mode="two-stage"), "task.mode"),
        (LongBenchV2Config(data="smal"), "task.data"),
        (LongBenchV2Config(data="folder/absent.jsonl"), "task.data"),
        (LongBenchV2Config(data=__file__), "task.data"),
        (LongBenchV2Config(length=100), "task.length"),
        (LongBenchV2Config(length=4096, truncate_at=4096), "task.truncate_at"),
        (LongBenchV2Config(limit=0), "task.limit"),
        (LongBenchV2Config(seed=-1), "task.seed"),
        (
            LongBenchV2Config(mode="loglikelihood", generation=GenerationConfig(max_new_tokens=8)),
            "task.generation.max_new_tokens",
        ),
        (LongBenchV2Config(generation=GenerationConfig(sampling="beam")), "task.generation.sampling"),
        (RulerConfig(tasks=("vt",), generation=GenerationConfig(seed=-1)), "task.generation.seed"),
        (RulerConfig(tasks=("vt",), generation=GenerationConfig(thinking_tokens=0)), "task.generation.thinking_tokens"),
        (ExecutionConfig(device="tpu"), "execution.device"),
        (ExecutionConfig(backend="cuda"), "execution.backend"),
        (ExecutionConfig(backend="torhc"), "execution.backend"),
        (ExecutionConfig(page_size=8), "execution.page_size"),
        (ExecutionConfig(page_size=96), "execution.page_size"),
        (ExecutionConfig(page_size=512), "execution.page_size"),
        (ExecutionConfig(page_size=-64), "execution.page_size"),
        (ExecutionConfig(page_shuffle=-1), "execution.page_shuffle"),
        (ExecutionConfig(chunk_size=0), "execution.chunk_size"),
        (ExecutionConfig(chunk_size=64), "execution.chunk_size"),
        (ExecutionConfig(chunk_size=-128), "execution.chunk_size"),
        (ExecutionConfig(seed=2**32), "execution.seed"),
        (ExecutionConfig(threads=0), "execution.threads"),
    ],
)
def test_settings_refuse(config, field):
    refused(config, field)


def test_unknown_names_get_near_matches():
    assert "did you mean niah_multikey_1" in str(refused(RulerConfig(tasks=("niah_multikey1",)), "task.tasks"))
    assert "did you mean last_quarter" in str(refused(PerplexityConfig(score="last_quater"), "task.score"))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes(page_size):
    ExecutionConfig(page_size=page_size).validate()


def test_corpora(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("text")
    for corpus in ("essays", "longbench_v2", "longbench_v2_small", str(file), __file__, "owner/data-set_1.0"):
        PerplexityConfig(corpus=corpus).validate()


# ------------------------------------------------------------------------------------------------------------ cell
def settings(**changes):
    base = {
        "model": {"name": "toy", "path": "owner/toy", "native_context": 4096},
        "method": {"name": "cosa", "select": {"p": 0.9}},
        "task": {"name": "perplexity"},
    }
    return {**base, **changes}


def test_cell_from_mapping():
    cell = cell_from_mapping(settings(out="~/runs"), ["method=cosa"])
    assert cell.method.select.p == 0.9 and cell.method.stride == 8
    assert cell.out == Path.home() / "runs" and cell.overrides == ("method=cosa",)
    assert pickle.loads(pickle.dumps(cell)) == cell
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.out = Path()


def test_label_shows_what_differs_and_what_was_asked_for():
    assert cell_from_mapping(settings()).label == "toy cosa select.p=0.9 perplexity@4096 (essays x 8)"
    page = ["method.page_size=32", "execution.page_size=64"]
    pageweaver = settings(method={"name": "pageweaver", "page_size": 32}, execution={"page_size": 64})
    assert "pageweaver page_size=32 execution.page_size=64 perplexity" in cell_from_mapping(pageweaver, page).label
    label = cell_from_mapping(settings(execution={"chunk_size": 256}), ["method.stride=8"]).label
    assert label == "toy cosa stride=8 select.p=0.9 chunk_size=256 perplexity@4096 (essays x 8)"
    ruler = {"name": "ruler", "tasks": ["vt", "cwe"], "limit": 3}
    assert cell_from_mapping(settings(task=ruler)).label == "toy cosa select.p=0.9 ruler@4096 (2 tasks x 3)"


def test_as_dict_round_trips_through_plain_values():
    rope = {"type": "yarn", "factors": {8192: 2}}
    cell = cell_from_mapping(settings(model={**settings()["model"], "rope": rope}))
    plain = cell.as_dict()
    assert plain["method"]["name"] == "cosa" and plain["method"]["select"]["p"] == 0.9
    assert plain["model"]["rope"]["factors"] == {"8192": 2.0}
    assert cell_from_mapping(plain, plain["overrides"]) == cell


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": None}, "model"),
        ({"method": {"name": "coas"}}, "method.name"),
        ({"method": {"name": "cosa", "strid": 4}}, "method.strid"),
        ({"method": {"name": "cosa", "select": {"q": 4}}}, "method.select.q"),
        ({"method": {"name": "cosa", "select": {"p": 2.0}}}, "method.select.p"),
        ({"task": {"name": "rular"}}, "task.name"),
        ({"task": {"name": "perplexity", "length": 4097}}, "task.length"),
        ({"model": {"name": "toy"}}, "model.native_context"),
        ({"execution": {"chunk_size": 100}}, "execution.chunk_size"),
    ],
)
def test_cell_refuses(changes, field):
    with pytest.raises(InputError) as stop:
        cell_from_mapping(settings(**changes))
    assert stop.value.field == field


def test_chunks_need_a_method_that_allows_them_and_end_on_its_blocks():
    @dataclasses.dataclass(frozen=True)
    class FromLastQueries:
        block_size: int = 128
        chunk_problem = "plans from the whole prompt"

        def validate(self):
            pass

    cell = cell_from_mapping(settings())
    execution = ExecutionConfig(chunk_size=384)
    refused(dataclasses.replace(cell, method=FromLastQueries(), execution=execution), "execution.chunk_size")
    wide = dataclasses.make_dataclass("Wide", [("block_size", int, 256)], bases=(FromLastQueries,), frozen=True)
    assert "block_size=256" in str(
        refused(dataclasses.replace(cell, method=wide(), execution=execution), "execution.chunk_size")
    )
    dataclasses.replace(cell, execution=execution).validate()


def test_build_converts_nested_values():
    config = build(RopeConfig, {"type": "yarn", "factors": {"8192": 2}, "static_factor": 4}, "model.rope")
    assert config.factors == {8192: 2.0} and isinstance(config.static_factor, float)
    assert unwrap_optional(int | None) is int and unwrap_optional(int) is int


# ------------------------------------------------------------------------------------------------------------ conf/
@pytest.fixture(scope="module")
def composed():
    schema.register()
    sweeper.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("evalkit.conf", version_base="1.3"):
        yield lambda *overrides, **kw: compose("config", overrides=list(overrides), **kw)


def names(group):
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


LOCAL = ("model.path=owner/any", "model.native_context=8192")


@pytest.mark.parametrize("name", names("model"))
def test_model_presets(composed, name):
    rest = LOCAL if name == "local" else ()
    cell = cell_from_config(composed(f"model={name}", "method=cosa", "task=perplexity", *rest))
    assert cell.model.name == name


@pytest.mark.parametrize("name", [n for n in names("method") if "llama" not in n])  # those need their calibration
def test_method_presets(composed, name):
    cell = cell_from_config(composed(f"method={name}", "task=ruler", "model=qwen3-8b"))
    assert type(cell.method) is methods_registry().get(cell.as_dict()["method"]["name"])


@pytest.mark.parametrize("name", names("task"))
def test_task_presets(composed, name):
    cell = cell_from_config(composed("method=dense", f"task={name}", "model=qwen3-8b"))
    assert cell.task.name == ("longbench_v2" if name.startswith("longbench-v2") else name.partition("-")[0])


@pytest.mark.parametrize("name", ["longbench-v2-small", "perplexity", "ruler", "ruler-quick"])
def test_task_presets_for_the_embedded_model(composed, name):
    cell_from_config(composed("method=dense", f"task={name}"))


def test_every_method_has_a_preset_of_its_name():
    assert set(methods_registry()) <= set(names("method"))


def test_ruler_preset_names_all_tasks(composed):
    from evalkit.benchmarks.ruler import TASKS

    assert set(cell_from_config(composed("method=dense", "task=ruler")).task.tasks) == set(TASKS)


def test_embedded_model_is_the_pinned_package(composed):
    from evalkit.assets import EMBEDDED_MODEL

    package = cell_from_config(composed("method=dense", "task=perplexity")).model.package
    assert dataclasses.asdict(package) == dataclasses.asdict(EMBEDDED_MODEL)


def test_published_qwen_settings(composed):
    for name, scale in (("cosa-qwen3-8b", 2000.0), ("cosa-accurate-qwen3-8b", 1000.0)):
        method = cell_from_config(composed(f"method={name}", "task=ruler", "model=qwen3-8b")).method
        assert (method.select.p, method.skip_scale, method.order) == (0.95, scale, "hrm_first")
    config = cell_from_config(composed("method=dense", "task=ruler", "model=qwen3-8b")).model
    factors = [config.rope_factor(length) for length in (4096, 32768, 65536, 131072)]
    assert factors == [1.0, 1.0, 2.0, 4.0]
    static = cell_from_config(composed("method=dense", "task=ruler", "model=qwen3-8b-yarn4")).model
    assert static.rope_factor(4096) == 4.0 and static.max_length == 131072


@pytest.mark.parametrize("name", names("sweep"))
def test_sweep_presets(composed, name):
    """Each grid composes and validates; every sparse task has its dense twin."""
    config = composed(f"sweep={name}", "method=dense", "task=perplexity", return_hydra_config=True)
    grids = [list(grid) for grid in config.hydra.sweeper.grids]
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    cells: list[Cell] = []
    for grid in grids:
        for overrides in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(grid), None)[0]:
            try:
                cells.append(cell_from_config(composed(*overrides)))
            except InputError as error:
                # Settings that nobody has published wait for a calibration of the model.
                assert "llama" in name and "run: evalkit calibrate" in str(error)
    assert len(cells) > 2
    plain = [cell.as_dict() for cell in cells]
    sections = [{key: section[key] for key in ("model", "task")} for section in plain]
    dense = [part for part, whole in zip(sections, plain, strict=True) if whole["method"]["name"] == "dense"]
    assert all(part in dense for part in sections)
    assert all(first != second for first, second in pairwise(sorted(map(str, plain))))


def test_schema_is_typed(composed):
    from hydra.errors import ConfigCompositionException

    for bad in ("execution.page_size=many", "execution.pages=3", "model.chat=perhaps", "task.limit=1.5"):
        with pytest.raises(ConfigCompositionException):
            composed("method=dense", "task=perplexity", bad)
