"""The reference itself, against goldens of two other implementations and its own identities."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import reference as ref

DATA = Path(__file__).parent / "data"


def fixture(name: str) -> Path:
    """A file or folder of the larger fixture set: in LILY_FIXTURES, or beside the repository."""
    named = os.environ.get("LILY_FIXTURES")
    folders = [Path(named)] if named else [p / "shared/fixtures" for p in DATA.parents[1].parents]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not here: set LILY_FIXTURES to a folder that has it")


@pytest.fixture(scope="module")
def calm():
    return ref.Model.load(DATA / "mlx4_calm")


@pytest.fixture(scope="module")
def golden():
    return load_file(DATA / "golden_calm.safetensors")


@pytest.fixture(scope="module")
def long_golden():
    return load_file(DATA / "golden_long_calm.safetensors")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def near(a, b, bound):
    assert np.shape(a) == np.shape(b)
    assert np.abs(a - b).max() <= bound  # false for NaN


# --------------------------------------------------------------------------------------------------
# The model against goldens


def check_golden(model, golden, bound):
    trace = {}
    logits, state = model.forward(golden["ids"], trace=trace)
    near(logits, golden["hf_f32.logits"], bound)
    near(logits, golden["mlx_q32.logits"], bound)
    inside = {k.removeprefix("hf_f32.") for k in golden if k.startswith("hf_f32.")} - {"logits"}
    assert inside == set(trace)
    for name in inside:
        exact = name.endswith("router_idx")
        near(trace[name], golden[f"hf_f32.{name}"], 0 if exact else bound)
    states = {"conv": state.conv, "state": state.delta, "k": state.K, "v": state.V}
    for name in (k for k in golden if k.startswith("cache.")):
        _, layer, kind = name.split(".")
        mine = states[kind][int(layer[1:])]
        if kind in "kv":
            mine = mine.transpose(1, 0, 2)  # the golden keeps heads first
        near(mine, golden[name][0], bound)
    assert state.position == len(golden["ids"])
    token = int(logits[-1].argmax())
    for expected, row in zip(golden["greedy_ids"], golden["greedy_logits"], strict=True):
        assert token == expected
        logits, state = model.forward([token], state)
        near(logits[0], row, bound)
        token = int(logits[0].argmax())


def test_calm_golden(calm, golden):
    check_golden(calm, golden, 2e-5)


def test_chaotic_golden():
    model = ref.Model.load(fixture("mlx4"))
    check_golden(model, load_file(fixture("golden.safetensors")), 5e-4)


def test_vision_flavour_is_the_same_text_model():
    plain, vision = ref.Model.load(fixture("mlx4")), ref.Model.load(fixture("mlx4_vlm"))
    assert plain.weights.keys() == vision.weights.keys()
    for name, weight in plain.weights.items():
        np.testing.assert_array_equal(weight, vision.weights[name])


def test_first_700_tokens_of_the_long_golden(calm, long_golden):
    logits, _ = calm.forward(long_golden["ids"][:700])
    pos = long_golden["pos"][long_golden["pos"] < 700]
    assert len(pos) == 7
    near(logits[pos], long_golden["hf_f32.logits"][: len(pos)], 2e-5)


@pytest.mark.slow
def test_long_golden(calm, long_golden):
    logits, state = calm.forward(long_golden["ids"])
    near(logits[long_golden["pos"]], long_golden["hf_f32.logits"], 2e-5)
    for i in state.delta:
        near(state.conv[i], long_golden[f"cache.L{i}.conv"][0], 2e-5)
        near(state.delta[i], long_golden[f"cache.L{i}.state"][0], 2e-5)


def test_chunks_continue_a_state_and_leave_it_alone(calm, golden):
    ids = golden["ids"]
    whole, end = calm.forward(ids)
    first, early = calm.forward(ids[:2])  # shorter than the conv's memory
    kept = {i: early.delta[i].copy() for i in early.delta}
    for _ in range(2):  # the second time from the same state: forward must not have changed it
        parts, state, at = [first], early, 2
        for size in (1, 1, 1, 37, 54):
            logits, state = calm.forward(ids[at : at + size], state)
            parts.append(logits)
            at += size
        near(np.concatenate(parts), whole, 1e-11)
        for old, new in ((end.conv, state.conv), (end.delta, state.delta), (end.K, state.K)):
            for i in old:
                near(new[i], old[i], 1e-11)
    for i in kept:
        np.testing.assert_array_equal(early.delta[i], kept[i])


# --------------------------------------------------------------------------------------------------
# Numbers


def test_bf16_bits():
    cases = [
        (0x3F80, 1.0),
        (0xBF80, -1.0),
        (0x4049, 3.140625),
        (0x0001, 2.0**-133),  # subnormal
        (0x8000, 0.0),
        (0x7F80, np.inf),
    ]
    for bits, value in cases:
        assert ref.from_bf16(bits) == value
    every = np.arange(1 << 16).astype(np.uint16)
    every = every[(every & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(ref.to_bf16(ref.from_bf16(every)), every)
    assert ref.round_bf16(1 + 2.0**-8) == 1  # a tie goes to the even neighbour: down here,
    assert ref.round_bf16(1 + 3 * 2.0**-8) == 1 + 2.0**-6  # up here
    assert ref.round_bf16(1 + 2.0**-8 + 2.0**-20) == 1 + 2.0**-7


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_dequantize_against_a_scalar_loop(rng, bits, group):
    experts, rows, width = 2, 3, 256
    words = rng.integers(0, 1 << 32, (experts, rows, width * bits // 32), dtype=np.uint32)
    scales = rng.normal(size=(experts, rows, width // group))
    biases = rng.normal(size=scales.shape)
    got = ref.dequantize(words, scales, biases, bits, group)
    assert (scales < 0).any() and got.shape == (experts, rows, width)
    for e, r, j in np.ndindex(got.shape):
        word = int(words[e, r, j * bits // 32])
        code = word >> (j * bits % 32) & ((1 << bits) - 1)
        assert got[e, r, j] == scales[e, r, j // group] * code + biases[e, r, j // group]


def test_dequantize_refuses_a_group_that_does_not_fit():
    with pytest.raises(AssertionError, match="64 codes per row, 2 groups of 64"):
        ref.dequantize(np.ones((1, 8), np.uint32), np.ones((1, 2)), np.ones((1, 2)), 4, 64)


def test_elementwise_at_the_ends():
    x = np.array([-800.0, -40.0, 0.0, 40.0, 800.0])
    np.testing.assert_allclose(ref.softplus(x), [0, np.exp(-40), np.log(2), 40, 800])
    np.testing.assert_allclose(ref.sigmoid(x), [0, np.exp(-40), 0.5, 1, 1])
    np.testing.assert_allclose(ref.silu(x), [0, -40 * np.exp(-40), 0, 40, 800])


def test_norms(rng):
    x, gain = rng.normal(size=(3, 64)), rng.normal(size=64)
    near((ref.rms_norm(x, np.ones(64), 0.0) ** 2).mean(-1), np.ones(3), 1e-14)
    near((ref.l2_norm(x, 0.0) ** 2).sum(-1), np.ones(3), 1e-14)
    near(ref.l2_norm(np.full((1, 4), 1e-3)), np.full((1, 4), 1e-3 / np.sqrt(5e-6)), 1e-15)
    W = rng.normal(size=(5, 64))
    mean_square = (x * x).mean(-1, keepdims=True)
    near(ref.project(x, W, gain, 0.5), (x * gain) @ W.T / np.sqrt(mean_square + 0.5), 1e-12)


# --------------------------------------------------------------------------------------------------
# DeltaNet


def delta_inputs(rng, tokens, key_heads=2, value_heads=6, width=128):
    q = ref.l2_norm(rng.normal(size=(tokens, key_heads, width)))
    k = ref.l2_norm(rng.normal(size=(tokens, key_heads, width)) + 0.5)
    v = rng.normal(size=(tokens, value_heads, width))
    g, beta = ref.delta_gates(
        3 * rng.normal(size=(tokens, value_heads)),
        rng.normal(size=(tokens, value_heads)),
        -np.exp(rng.normal(size=value_heads)),
        rng.normal(size=value_heads),
    )
    return q, k, v, g, beta, rng.normal(size=(value_heads, width, width))


def test_delta_rule_by_its_formula(rng):
    q, k, v, g, beta, S = delta_inputs(rng, 5)
    o, end = ref.delta_rule(q, k, v, g, beta, S)
    for h in range(6):
        s = S[h]
        for t in range(5):
            key, query = k[t, h // 3], q[t, h // 3]
            s = np.exp(g[t, h]) * (s - beta[t, h] * np.outer(s @ key, key))
            s = s + beta[t, h] * np.outer(v[t, h], key)
            near(o[t, h], s @ query / np.sqrt(128), 1e-12)
        near(end[h], s, 1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_delta_rule_is_the_serial_one(rng, tokens, chunk):
    inputs = delta_inputs(rng, tokens)
    o, state = ref.delta_rule(*inputs)
    chunked, end = ref.delta_rule_chunked(*inputs, chunk=chunk)
    near(chunked, o, 1e-10)
    near(end, state, 1e-10)


def test_chunked_delta_rule_survives_total_forgetting(rng):
    q, k, v, g, beta, state = delta_inputs(rng, 130)
    g = g * 300  # exp of a sum over a chunk underflows, of its negative overflows
    o, end = ref.delta_rule(q, k, v, g, beta, state)
    chunked, chunk_end = ref.delta_rule_chunked(q, k, v, g, beta, state)
    near(chunked, o, 1e-10)
    near(chunk_end, end, 1e-10)


def test_delta_conv_carries_its_rows(rng):
    x, weight, carried = (rng.normal(size=s) for s in ((9, 5), (5, 4), (3, 5)))
    y, last = ref.delta_conv(x, weight, carried)
    rows = np.concatenate([carried, x])
    for t, c in np.ndindex(y.shape):
        near(y[t, c], ref.silu(np.dot(rows[t : t + 4, c], weight[c])), 1e-14)
    np.testing.assert_array_equal(last, x[-3:])
    first, between = ref.delta_conv(x[:1], weight, carried)
    np.testing.assert_array_equal(between, np.concatenate([carried[1:], x[:1]]))
    second, end = ref.delta_conv(x[1:], weight, between)
    np.testing.assert_array_equal(np.concatenate([first, second]), y)
    np.testing.assert_array_equal(end, last)


def test_delta_step_and_out_are_the_unfused_layer(rng):
    Hk, Hv, D, tokens, hidden, eps = 2, 4, 128, 6, 64, 1e-6
    channels = (2 * Hk + Hv) * D
    qkv, z = rng.normal(size=(tokens, channels)), rng.normal(size=(tokens, Hv * D))
    a, b = rng.normal(size=(2, tokens, Hv))
    taps, carried = rng.normal(size=(channels, 4)), rng.normal(size=(3, channels))
    decay, dt, gain = -np.exp(rng.normal(size=Hv)), rng.normal(size=Hv), rng.normal(size=D)
    state, W = rng.normal(size=(Hv, D, D)), rng.normal(size=(hidden, Hv * D))
    u, sums, rows, end = ref.delta_step(qkv, z, a, b, taps, decay, dt, gain, carried, state)
    mixed, plain_rows = ref.delta_conv(qkv, taps, carried)
    q, k, v = mixed[:, : Hk * D], mixed[:, Hk * D : 2 * Hk * D], mixed[:, 2 * Hk * D :]
    q, k, v = (x.reshape(tokens, -1, D) for x in (q, k, v))
    o, plain_end = ref.delta_rule(
        ref.l2_norm(q), ref.l2_norm(k), v, *ref.delta_gates(a, b, decay, dt), state
    )
    normed = ref.gated_norm(o, z.reshape(tokens, Hv, D), gain, eps)
    near(ref.delta_out(u, sums, W, eps), normed.reshape(tokens, -1) @ W.T, 1e-10)
    np.testing.assert_array_equal(rows, plain_rows)
    np.testing.assert_array_equal(end, plain_end)


# --------------------------------------------------------------------------------------------------
# Attention


def test_rope_is_a_rotation_of_half_split_pairs(rng):
    inv_freq = ref.rope_inv_freq(64, 1e7)
    assert inv_freq.dtype == np.float32 and inv_freq[0] == 1
    assert inv_freq[31] == np.float32(1e7 ** (-62 / 64))
    x, positions = rng.normal(size=(3, 2, 256)), np.array([0, 5, 262_143])
    y = ref.rope(x, positions, inv_freq)
    np.testing.assert_array_equal(y[..., 64:], x[..., 64:])
    np.testing.assert_array_equal(y[0], x[0])
    for t, p in enumerate(positions):
        angle = np.float64(np.float32(p) * inv_freq)
        turned = (x[t, :, :32] + 1j * x[t, :, 32:64]) * np.exp(1j * angle)
        near(y[t, :, :32] + 1j * y[t, :, 32:64], turned, 1e-13)


def attention_inputs(rng, positions, length, q_heads=6, kv_heads=2, width=32):
    q = 3 * rng.normal(size=(len(positions), q_heads, width))
    K, V = rng.normal(size=(2, length, kv_heads, width))
    return q, K, V, np.asarray(positions), width**-0.5


@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_its_formula(rng, causal):
    positions = [0, 3, 4, 8, 2]
    q, K, V, positions, scale = attention_inputs(rng, positions, 9)
    out = ref.attention(q, K, V, positions, scale, causal)
    for t, h in np.ndindex(5, 6):
        keys = slice(0, positions[t] + 1 if causal else 9)
        weights = np.exp(K[keys, h // 3] @ q[t, h] * scale)
        near(out[t, h], weights @ V[keys, h // 3] / weights.sum(), 1e-13)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 512, 700])
def test_split_and_combine_is_attention(rng, length):
    positions = sorted({0, length // 2, max(0, length - 2), length - 1})
    q, K, V, positions, scale = attention_inputs(rng, positions, length)
    partials = ref.attention_split(q, K, V, positions, scale)
    assert len(partials[0]) == -(-length // 256)
    near(ref.attention_combine(partials), ref.attention(q, K, V, positions, scale), 1e-13)
    n, row = len(partials[0]) - 1, 0
    if n > 0:  # position 0 does not see the last split
        m, total, acc = (p[n, row] for p in partials)
        assert (m == -np.inf).all() and (total == 0).all() and (acc == 0).all()


def test_combine_of_splits_far_apart(rng):
    q, K, V, positions, scale = attention_inputs(rng, [600], 601)
    q *= 1e3  # exp of the difference of two splits' maxima overflows
    m = ref.attention_split(q, K, V, positions, scale)[0]
    assert (m.max(0) - m[0]).max() > 710
    combined = ref.attention_combine(ref.attention_split(q, K, V, positions, scale))
    near(combined, ref.attention(q, K, V, positions, scale), 1e-13)


def test_attention_in_pieces_of_queries(rng):
    q, K, V, positions, scale = attention_inputs(rng, range(600), 600)
    whole = ref.attention(q, K, V, positions, scale)
    near(whole[590:], ref.attention(q[590:], K, V, positions[590:], scale), 1e-13)


def test_query_and_gate_alternate_by_head():
    q, gate = ref.split_q_gate(np.arange(12.0)[None], 2)
    assert q.tolist() == [[[0, 1], [4, 5], [8, 9]]]
    assert gate.tolist() == [[[2, 3], [6, 7], [10, 11]]]
    near(ref.attn_gate(np.array([2.0]), np.array([0.0])), np.array([1.0]), 0)


# --------------------------------------------------------------------------------------------------
# Experts


def test_router_orders_and_breaks_ties_by_id():
    idx, weights = ref.router(np.array([[1.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 5]), 3)
    assert idx.tolist() == [[1, 3, 2], [0, 1, 2]]
    e = np.exp(-1)
    near(weights, np.array([[1, 1, e], [(2 + e) / 3] * 3]) / (2 + e), 1e-15)


def test_moe_by_its_formula(rng):
    T, H, I, E = 7, 32, 16, 5  # noqa: E741
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    w = {f"switch_mlp.{n}": rng.normal(size=(E, *s)) for n, s in shapes.items()}
    w |= {f"shared_expert.{n}": rng.normal(size=s) for n, s in shapes.items()}
    w["shared_expert_gate"] = rng.normal(size=(1, H))
    x = rng.normal(size=(T, H))
    idx, weights = ref.router(rng.normal(size=(T, E)), 3)

    def expert(v, gate, up, down):
        return down @ (ref.silu(gate @ v) * (up @ v))

    out = ref.moe(x, idx, weights, w)
    for t in range(T):
        expected = ref.sigmoid(w["shared_expert_gate"] @ x[t]) * expert(
            x[t], *(w[f"shared_expert.{n}"] for n in shapes)
        )
        for e, weight in zip(idx[t], weights[t], strict=True):
            expected += weight * expert(x[t], *(w[f"switch_mlp.{n}"][e] for n in shapes))
        near(out[t], expected, 1e-11)


# --------------------------------------------------------------------------------------------------
# Scores and sampling


def test_score():
    logits = np.array([[1000.0, 1000.0, -1000.0], [0.0, np.log(2), np.log(5)]])
    logprob, argmax = ref.score(logits, np.array([1, 1]))
    near(logprob, np.log([1 / 2, 2 / 8]), 1e-12)
    assert argmax.tolist() == [0, 2]


def test_philox_known_answers():
    full = 0xFFFFFFFF
    cases = [
        (0, [0] * 4, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (full << 32 | full, [full] * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0_A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for seed, counter, words in cases:
        assert " ".join(f"{w:08x}" for w in ref.philox(seed, np.array(counter))) == words


def test_uniform_takes_one_word_per_id():
    seed, position = 0x1234_5678_9ABC_DEF0, 77
    u = ref.uniform(seed, position, np.arange(10))
    for token, value in enumerate(u):
        word = int(ref.philox(seed, np.array([token // 4, position, 0, 0]))[token % 4])
        assert value == ((word >> 8) + 0.5) / 2**24
    assert len(set(u)) == 10
    assert (u != ref.uniform(seed, position + 1, np.arange(10))).all()
    assert (u != ref.uniform(seed + (1 << 32), position, np.arange(10))).all()
    many = ref.uniform(3, 0, np.arange(200_000))
    assert many.min() > 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.003


def kept(logits, **settings):
    return np.flatnonzero(ref.candidates(np.asarray(logits, float), **settings) > -np.inf).tolist()


def test_penalties_of_what_was_said():
    logits = np.array([4.0, -4.0, 4.0, -4.0, 1.0])
    out = ref.penalties(logits, [0, 1], [2, 3, 3], repetition=2, presence=0.5, frequency=0.25)
    # prompt ids only pay repetition; 3 was generated twice
    assert out.tolist() == [2, -8, 2 - 0.75, -8 - 1.0, 1]
    assert logits.tolist() == [4, -4, 4, -4, 1]
    np.testing.assert_array_equal(ref.penalties(logits, [], []), logits)


def test_filters_keep_exactly_what_they_say():
    tied = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert kept(tied) == [0, 1, 2, 3, 4]
    assert kept(tied, top_k=2) == [1, 2]
    assert kept(tied, top_k=4) == [0, 1, 2, 3]
    assert kept(tied, top_k=9) == [0, 1, 2, 3, 4]
    probs = np.log([0.1, 0.4, 0.3, 0.2])
    assert kept(probs, top_p=0.35) == [1]
    assert kept(probs, top_p=0.45) == [1, 2]  # the id that crosses the line stays
    assert kept(probs, top_p=0.95) == [0, 1, 2, 3]
    assert kept(probs, top_p=0.0) == [1]
    assert kept([0.0, 0.0], top_p=0.5) == [0]  # exactly reached is reached
    assert kept(probs, min_p=0.6) == [1, 2]
    assert kept(probs, min_p=1.0) == [1]
    assert kept(probs, temperature=0) == [1]
    # top-p measures what top-k has left: of 0.4 / 0.7, 0.3 / 0.7 the first alone holds 0.57
    assert kept(probs, top_k=2, top_p=0.55) == [1]
    # and after temperature: 0.16, 0.09, 0.04, 0.01 of 0.30
    assert kept(probs, temperature=0.5, top_p=0.5) == [1]
    assert kept(probs, temperature=0.5, min_p=0.6) == [1]


def test_masks_come_before_the_filters():
    logits = [5.0, 4.0, 3.0, 2.0, 9.0]
    assert kept(logits, last_id=3, top_k=2) == [0, 1]
    allowed = np.array([0, 0, 1, 1, 1], bool)
    assert kept(logits, last_id=3, allowed=allowed, top_k=1) == [2]
    assert kept(logits, last_id=3, bias={3: 10.0, 4: 100.0}, temperature=0) == [3]
    assert kept(logits, bias={4: -np.inf}) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no id is allowed"):
        kept(logits, last_id=1, allowed=allowed)


def test_single_candidate_is_argmax(rng):
    for position in range(50):
        logits = np.round(rng.normal(size=100), 1)  # rounded, so that ties occur
        for settings in ({"top_k": 1}, {"temperature": 0}, {"top_p": 0.0}):
            assert ref.sample(logits, seed=9, position=position, **settings) == logits.argmax()


def test_draws_follow_the_probabilities_and_only_the_seed():
    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    logits = np.log(probs, where=probs > 0, out=np.full(5, -np.inf))
    draws = [ref.sample(logits, seed=11, position=p) for p in range(4000)]
    counts = np.bincount(draws, minlength=5)
    assert counts[1] == 0
    expected = 4000 * probs[probs > 0]
    chi2 = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, one run in a thousand
    assert draws[:50] == [ref.sample(logits, seed=11, position=p) for p in range(50)]
    assert draws[:50] != [ref.sample(logits, seed=12, position=p) for p in range(50)]


def test_a_draw_does_not_depend_on_what_the_filters_dropped(rng):
    logits = rng.normal(size=64)
    for position in range(100):
        token = ref.sample(logits, seed=1, position=position)
        keep = ref.by_rank(logits)[:20]
        if token in keep:
            assert ref.sample(logits, seed=1, position=position, top_k=20) == token
