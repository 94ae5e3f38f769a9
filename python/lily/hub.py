"""Owns the way from a model's name to a folder: a path as it is, a hub id downloaded or cached."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.errors import CheckpointError, LilyError
from lily.safetensors_header import read_json_object

PACKAGED_MODEL = Path(__file__).parent / "model"  # what runs when none is named

# What a checkpoint of this family consists of; nothing else is downloaded.
SETTINGS = ("*.json", "*.jinja")
FILES = (*SETTINGS, "*.safetensors")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str | os.PathLike[str]) -> bool:
    """Whether this names a repository of the hub: `owner/name`, and no such path exists.

    >>> is_hub_id("mlx-community/Qwen3.6-35B-A3B-4bit"), is_hub_id("./models/mine")
    (True, False)
    """
    return isinstance(model, str) and bool(_ID.fullmatch(model)) and not os.path.lexists(model)


def fetch(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    weights: bool = True,
) -> Path:
    """The folder of a model.

    A path is returned as it is. A hub id is looked up in the hub's cache and what is missing there
    is downloaded; HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN mean what they
    mean to huggingface_hub. revision: a branch, a tag or a commit. progress: called with (bytes
    done, bytes in all), from the threads of the download. weights: False leaves them out.
    Raises LilyError if the model cannot be had, CheckpointError if only half of it was ever
    downloaded and the rest cannot be had now.
    """
    if not is_hub_id(model):
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {model} is a folder, not a hub id")
        return Path(model)
    import huggingface_hub  # local models never need it
    from huggingface_hub.errors import HfHubHTTPError

    name = os.fspath(model)
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(FILES if weights else SETTINGS),
            library_name="lily",
            tqdm_class=_bar(progress),
        )
    except HfHubHTTPError as error:
        raise LilyError(f"{name}: the hub answered: {' '.join(str(error).split())}") from error
    except Exception as error:  # of the network, the disk, the library
        if type(error).__name__ == "IncompleteSnapshotError":  # not in older releases
            raise CheckpointError(_half(name, revision, str(error))) from error
        raise LilyError(f"{name}: cannot be had: {' '.join(str(error).split())}") from error
    if weights:
        _check_whole(name, revision, Path(folder))
    return Path(folder)


def _check_whole(name: str, revision: str | None, folder: Path) -> None:
    """Offline, older releases hand out whatever part of a snapshot is there."""
    wanted = {"config.json", "tokenizer.json"}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json_object(index).get("weight_map")
        if isinstance(shards, dict):
            wanted |= {shard for shard in shards.values() if isinstance(shard, str)}
    elif not any(folder.glob("*.safetensors")):
        wanted.add("model.safetensors")
    missing = sorted(file for file in wanted if not (folder / file).exists())
    if missing:
        what = f"{len(missing)} of {len(wanted)} files are missing, the first is {missing[0]}"
        raise CheckpointError(_half(name, revision, what))


def _half(name: str, revision: str | None, what: str) -> str:
    at = f" at {revision}" if revision else ""
    return (
        f"{name}{at}: the cached snapshot is half-downloaded: {' '.join(what.split())}; "
        "load it again with a connection to complete it"
    )


def _bar(progress: Callable[[int, int], None] | None) -> type[Any]:
    """What huggingface_hub takes for a progress bar: it adds up bytes and shows nothing."""
    base: Any = importlib.import_module("tqdm.auto").tqdm  # huggingface_hub brings it
    lock = threading.Lock()
    best = [0]

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            with lock:
                self.n += n or 0
                # There is one for bytes received and one for bytes written: they go together.
                if progress is not None and self._bytes and self.total and self.n > best[0]:
                    best[0] = int(self.n)
                    progress(best[0], int(self.total))
            return None

    return Bar
