"""The whole model against the goldens of transformers and mlx-lm, and its routes against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import find_fixture, require_device
from kernel_harness import emulated
from lily import _core
from model_harness import CALM, DATA, engine, golden, ids_of, max_kl

CASES = [
    pytest.param("mlx4_calm", "golden_calm", 1e-4, id="calm"),
    pytest.param("mlx4", "golden", 5e-4, id="chaotic"),
    pytest.param("mlx4_vlm", "golden", 5e-4, id="vlm"),
]


def _places(folder: str, name: str) -> tuple[Path, Path]:
    if folder == "mlx4_calm":
        return CALM, DATA / "golden_calm.safetensors"
    return find_fixture(folder), find_fixture(f"{name}.safetensors")


@pytest.mark.parametrize(("folder", "name", "bound"), CASES)
def test_every_position_matches_the_golden(
    device: str, folder: str, name: str, bound: float
) -> None:
    path, file = _places(folder, name)
    g = golden(file)
    ids, want = ids_of(g["ids"]), g["hf_f32.logits"]
    session = _core.Session(engine(path, device, True))
    assert np.abs(session.forward(ids) - want).max() <= bound
    conv, delta = session.recurrent_state()
    for layer in range(3):
        assert np.abs(conv[layer] - g[f"cache.L{layer}.conv"][0]).max() <= 1e-4
        assert np.abs(delta[layer] - g[f"cache.L{layer}.state"][0]).max() <= 1e-4


@pytest.mark.parametrize(("folder", "name", "bound"), CASES)
def test_every_position_matches_the_golden_by_decoding(
    device: str, folder: str, name: str, bound: float
) -> None:
    path, file = _places(folder, name)
    g = golden(file)
    ids, want = ids_of(g["ids"]), g["hf_f32.logits"]
    if emulated(device):
        ids = ids[:24]  # a token takes a good part of a second there
    session = _core.Session(engine(path, device, True))
    for n in range(1, len(ids) + 1):
        assert session.sync(ids[:n]) == n - 1
        assert np.abs(session.logits() - want[n - 1]).max() <= bound, n


@pytest.mark.parametrize(("folder", "name", "bound"), CASES)
def test_greedy_tokens_match_the_golden(device: str, folder: str, name: str, bound: float) -> None:
    path, file = _places(folder, name)
    g = golden(file)
    session = _core.Session(engine(path, device, True))
    session.sync(ids_of(g["ids"]))
    # The golden's row i is the distribution after token i, so the one that token i + 1 came from.
    rows = [g["hf_f32.logits"][-1], *g["greedy_logits"]]
    for i, want in enumerate(g["greedy_ids"].reshape(-1)):
        token = session.step()
        assert token.id == want, i
        logits = session.logits().astype(np.float64)
        assert np.abs(logits - rows[i]).max() <= bound
        logprob = logits[want] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(token.logprob - logprob) <= 1e-4


def test_bf16_is_as_close_as_the_peers(device: str) -> None:
    g = golden(DATA / "golden_calm.safetensors")
    ids, want = ids_of(g["ids"]), g["hf_f32.logits"]
    model = engine(CALM, device, False)
    tiled = _core.Session(model).forward(ids)
    session = _core.Session(model)
    stepped = []
    for n in range(1, (25 if emulated(device) else len(ids)) + 1):
        session.sync(ids[:n])
        stepped.append(session.logits())
    for got in (tiled, np.array(stepped)):
        reference = want[: len(got)]
        assert np.abs(got - reference).mean() <= 0.03
        assert max_kl(reference, got) <= 0.03


# ---- 5,000 tokens: more than one tile, chunk, split and KV block ---------------------------------
def _check_long(session: _core.Session, n: int, rows: dict[int, np.ndarray]) -> None:
    g = golden(DATA / "golden_long_calm.safetensors")
    at = {int(p): row for p, row in zip(g["pos"], g["hf_f32.logits"]) if p < n}
    assert rows and set(rows) <= set(at)
    for position, row in rows.items():
        assert np.abs(row - at[position]).max() <= 1e-4, position
    if n == 5000:
        conv, delta = session.recurrent_state()
        for layer in range(3):
            assert np.abs(conv[layer] - g[f"cache.L{layer}.conv"][0]).max() <= 1e-4
            assert np.abs(delta[layer] - g[f"cache.L{layer}.state"][0]).max() <= 1e-4


def _long(device: str) -> tuple[np.ndarray, list[int]]:
    g = golden(DATA / "golden_long_calm.safetensors")
    n = 700 if emulated(device) else 5000
    return ids_of(g["ids"])[:n], [int(p) for p in g["pos"] if p < n]


def test_long_golden_in_one_prefill(device: str) -> None:
    """One sync, in the engine's own chunks, to the last sampled position; then the final states."""
    ids, positions = _long(device)
    session = _core.Session(engine(CALM, device, True))
    session.sync(ids[: positions[-1] + 1])
    rows = {positions[-1]: session.logits()}
    if len(ids) == 5000:
        session.sync(ids)
    _check_long(session, len(ids), rows)


def test_long_golden_in_chunks_of_512(device: str) -> None:
    ids, positions = _long(device)
    session = _core.Session(engine(CALM, device, True))
    rows = {}
    for start in range(0, len(ids), 512):
        logits = session.forward(ids[start : start + 512])
        rows |= {p: logits[p - start] for p in positions if start <= p < start + 512}
    _check_long(session, len(ids), rows)


def test_long_golden_with_ten_steps_at_the_end(device: str) -> None:
    ids, positions = _long(device)
    ids = ids[: positions[-1] + 5] if len(ids) < 5000 else ids
    session = _core.Session(engine(CALM, device, True))
    session.sync(ids[:-10])
    rows = {len(ids) - 11: session.logits()}
    for n in range(len(ids) - 9, len(ids) + 1):
        session.sync(ids[:n])
        rows[n - 1] = session.logits()
    _check_long(session, len(ids), {p: row for p, row in rows.items() if p in positions})


# ---- sameness (a): bitwise ------------------------------------------------------------------------
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bf16"])
def test_verify_and_commit_equal_single_steps_bitwise(device: str, exact: bool) -> None:
    """verify(m) gives the logits of m single tokens, commit(n) their state, for every m and n."""
    g = golden(DATA / "golden_long_calm.safetensors")
    ids = ids_of(g["ids"])
    model = engine(CALM, device, exact)
    # The rows straddle a KV block and an attention split.
    prompt = ids[:250]
    most = 16
    sizes = [(m, n) for m in range(1, 17) for n in range(1, m + 1)]
    if emulated(device):  # a row takes a good part of a second; 16 rows are in the kernels' tests
        prompt, most, sizes = ids[:253], 5, [(1, 1), (3, 2), (5, 5)]
    start = len(prompt)
    single = _core.Session(model)
    single.sync(prompt)
    logits, states = [], [single.recurrent_state()]
    for n in range(1, most + 1):
        single.sync(ids[: start + n])
        logits.append(single.logits())
        states.append(single.recurrent_state())
    session = _core.Session(model)
    session.sync(prompt, snapshot_at=[start])
    for m, n in sizes:
        got = session.verify(ids[start : start + m])
        assert np.array_equal(got, np.array(logits[:m])), (m, n)
        assert session.position == start
        session.commit(n)
        assert np.array_equal(session.tokens, ids[: start + n])
        conv, delta = session.recurrent_state()
        assert np.array_equal(conv, states[n][0]), (m, n)
        assert np.array_equal(delta, states[n][1]), (m, n)
        assert np.array_equal(session.logits(), logits[n - 1])
        session.rewind(start)
        assert np.array_equal(session.recurrent_state()[1], states[0][1])


def test_rejected_drafts_leave_no_trace(device: str) -> None:
    """Wrong drafts are verified, the right ones are taken: the next logits are those of a clean run."""
    ids = ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"])
    model = engine(CALM, device, False)
    session, clean = _core.Session(model), _core.Session(model)
    for s in (session, clean):
        s.sync(ids[:20])
    session.verify(np.concatenate([ids[20:22], ids[30:35]]))
    session.commit(2)
    got = session.verify(ids[22:24])
    want = clean.verify(ids[20:24])[2:]
    assert np.array_equal(got, want)


# ---- sameness (b): every route, chunking and reuse gives the same tokens in exact mode -------------
def test_chunkings_agree(device: str) -> None:
    ids = ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"])[:200]
    chunkings = [[17, 64, 65, 54], [128, 72], [1, 199], [63, 1, 136]]
    if emulated(device):
        ids, chunkings = ids[:90], [[17, 65, 8], [63, 1, 26]]
    model = engine(CALM, device, True)
    want = _core.Session(model).forward(ids)
    for sizes in chunkings:
        session = _core.Session(model)
        rows, start = [], 0
        for size in sizes:
            rows.append(session.forward(ids[start : start + size]))
            start += size
        assert np.abs(np.concatenate(rows) - want).max() <= 1e-4, sizes


def test_cuda_and_cpu_agree_on_states() -> None:
    """A second, stricter look at one pair of devices."""
    require_device("cuda")
    ids = ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"])[:600]
    states = []
    for name in ("cpu", "cuda"):
        session = _core.Session(engine(CALM, name, True))
        session.sync(ids)
        states.append(session.recurrent_state()[1])
    assert np.abs(states[0] - states[1]).max() <= 1e-4
