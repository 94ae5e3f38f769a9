"""Pinned macOS wheels that facts about Apple's API are taken from: downloaded once, kept in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class Unavailable(RuntimeError):
    """A wheel is neither in the cache nor to be had; says why."""


@dataclass(frozen=True)
class Wheel:
    """A release on PyPI and the only bytes of it that are accepted."""

    name: str
    version: str
    platform: str
    sha256: str


# metal-cpp of three SDKs (its versions 354, 367, 370) comes inside these.
MACOS_14 = Wheel(
    "mlx",
    "0.10.0",
    "macosx_14_0_arm64",
    "94447afc255f454f15b17ddf437a5f8b5c19cd30e24d34895cef2e92bfc80f86",
)
MACOS_15 = Wheel(
    "mlx",
    "0.25.2",
    "macosx_15_0_arm64",
    "24055a8fba9a6261d94dbfd31c37ede75106c7a832cb0609cb5b65e7e903e1fb",
)
MACOS_26 = Wheel(
    "mlx-metal",
    "0.32.4",
    "macosx_26_0_arm64",
    "514df92d41a286895d2564b4b18f4da45096bd7a4a0c47e1042f345ad5a7f936",
)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lily-tests"


def fetch(wheel: Wheel, part: str) -> Path:
    """The folder with those files of the wheel that have `part` in their path; safe in parallel."""
    where = cache_folder() / f"{wheel.name}-{wheel.version}-{part.strip('/').replace('/', '-')}"
    if where.exists():
        return where
    where.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=where.parent))
    try:
        archive = _download(wheel, scratch)
        content = scratch / "content"
        with zipfile.ZipFile(archive) as files:
            files.extractall(content, [name for name in files.namelist() if part in name])
        if not content.exists():
            raise Unavailable(f"{archive.name} has no file with {part} in its path")
        try:
            content.rename(where)
        except OSError:  # another process was first; its content is the same
            if not where.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return where


def _download(wheel: Wheel, folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
    command += ["--platform", wheel.platform, "--require-hashes", "-r", str(wanted)]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise RuntimeError(f"{wheel.name} {wheel.version} is not the file that was pinned")
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise Unavailable(f"pip cannot download {wheel.name} {wheel.version}: {last}")
    return next(folder.glob("*.whl"))
