"""Hub ids: the cache, revisions, offline, half a snapshot, a download from a hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import lily
from lily.hub import fetch, is_hub_id
from text_harness import CALM

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "some-one/tiny.model"
MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]

LOAD = """
import sys, lily
options = {"revision": sys.argv[2]} if len(sys.argv) > 2 else {}
seen = []
try:
    with lily.Engine.load(sys.argv[1], device="cpu", progress=lambda *at: seen.append(at), **options) as engine:
        print(engine.generate("Once", max_tokens=4).text)
        print(sorted({total for _, total in seen}), file=sys.stderr)
except lily.LilyError as error:
    print(type(error).__name__, error)
"""


def load(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", LOAD, *arguments],
        env={**clean, "HF_HOME": str(home), **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def cached(home: Path, files: list[str]) -> Path:
    """A snapshot as `hf download` leaves it."""
    store = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = store / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs/main").write_text(COMMIT)
    for file in files:
        (snapshot / file).symlink_to((CALM / file).resolve())
    return snapshot


@pytest.fixture(scope="module")
def text() -> str:
    with lily.Engine.load(CALM, device="cpu") as engine:
        return engine.generate("Once", max_tokens=4).text


def test_what_is_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert is_hub_id(NAME)
    for path in ("folder", "./a/b", "/a/b", "../a", "a/b/c", "a/", "-a/b", "~/b", Path("a/b")):
        assert not is_hub_id(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert not is_hub_id(NAME)  # a folder of that name is meant


def test_a_path_never_touches_the_hub(tmp_path: Path) -> None:
    assert fetch(CALM) == fetch(str(CALM)) == CALM
    with pytest.raises(ValueError, match=r"revision is .main., but .* is a folder"):
        lily.Engine.load(CALM, revision="main")
    script = f"import sys, lily; lily.Engine.load({str(CALM)!r}, device='cpu'); sys.exit('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0


def test_the_cache_offline(tmp_path: Path, text: str) -> None:
    cached(tmp_path, MODEL_FILES)
    for arguments in ((NAME,), (NAME, "main"), (NAME, COMMIT)):
        done = load(tmp_path, *arguments, HF_HUB_OFFLINE="1")
        assert done.stdout == text + "\n", done.stderr
    done = load(tmp_path, NAME, "other", HF_HUB_OFFLINE="1")
    assert done.stdout.startswith(f"LilyError {NAME}: cannot be had: ")
    done = load(tmp_path / "empty", NAME, HF_HUB_OFFLINE="1")
    assert done.stdout.startswith(f"LilyError {NAME}: cannot be had: ")


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_half_a_snapshot_is_named(tmp_path: Path, missing: str) -> None:
    cached(tmp_path, [file for file in MODEL_FILES if file != missing])
    done = load(tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert done.stdout.startswith(f"CheckpointError {NAME}: the cached snapshot is half-downloaded")
    assert missing in done.stdout and done.stdout.count("\n") == 1


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs; the tokens that came are kept."""

    protocol_version = "HTTP/1.1"
    tokens: set[str | None] = set()  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        self.tokens.add(self.headers.get("Authorization"))
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [self._entry(file) for file in [*MODEL_FILES, "README.md"]]
            self._send(json.dumps(entries).encode(), "application/json", body)
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": file} for file in MODEL_FILES]
            about = {"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._send(json.dumps(about).encode(), "application/json", body)
        elif path.startswith(f"/{NAME}/resolve/"):
            data = (CALM / path.rsplit("/", 1)[1]).read_bytes()
            self._send(data, "application/octet-stream", body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _entry(self, file: str) -> dict[str, object]:
        data = (CALM / file).read_bytes()
        return {
            "type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest(),
        }  # fmt: skip

    def _send(self, data: bytes, kind: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.tokens.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download(hub: str, tmp_path: Path, text: str) -> None:
    online = {"HF_ENDPOINT": hub, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    done = load(tmp_path, NAME, **online)
    assert done.stdout == text + "\n", done.stdout + done.stderr
    totals = json.loads(done.stderr.splitlines()[-1])
    size = sum((CALM / file).stat().st_size for file in MODEL_FILES)
    assert totals[-1] == size  # the download was reported, then the loading
    assert "Bearer hf_secret" in Hub.tokens
    assert "secret" not in done.stdout + done.stderr
    snapshot = next((tmp_path / "hub").glob("models--*/snapshots/*"))
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(MODEL_FILES)
    again = load(tmp_path, NAME, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert again.stdout == text + "\n"
    # One file is lost: offline that is said, online it comes again.
    (snapshot / "model.safetensors").unlink()
    broken = load(tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert "half-downloaded" in broken.stdout and "model.safetensors" in broken.stdout
    assert load(tmp_path, NAME, **online).stdout == text + "\n"


def test_info_downloads_settings_only(hub: str, tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", "from lily.cli import main; main()", "info", NAME],
        env={**clean, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "3 DeltaNet, 1 attention" in done.stdout, done.stderr
    assert "6.3 MB of weights are not downloaded yet" in done.stdout
    assert not list((tmp_path / "hub").glob("models--*/snapshots/*/*.safetensors"))


def test_no_such_repository(hub: str, tmp_path: Path) -> None:
    done = load(tmp_path, "some-one/else", HF_ENDPOINT=hub)
    assert done.stdout.startswith("LilyError some-one/else: the hub answered: ")
    assert done.stdout.count("\n") == 1
