"""Models at the edges of the shapes that config.json may name, against the numpy model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import make_fixtures
import reference
from kernel_harness import emulated
from lily import _core
from model_harness import fresh_engine

BASE: dict[str, Any] = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    hidden_size=128,
    vocab_size=300,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    eos_token_id=2,
)


def _rope(share: float, theta: float = 1e7) -> dict[str, Any]:
    values = dict(rope_type="default", rope_theta=theta, partial_rotary_factor=share)
    return dict(rope_parameters=values)


SHAPES: dict[str, dict[str, Any]] = {
    "2 experts, top 1": dict(num_experts=2, num_experts_per_tok=1),
    "16 of 16 experts": dict(num_experts=16, num_experts_per_tok=16),
    "3 of 33 experts": dict(num_experts=33, num_experts_per_tok=3),
    "1024 experts": dict(num_experts=1024, num_experts_per_tok=16, hidden_size=64),
    "values as keys": dict(linear_num_key_heads=3, linear_num_value_heads=3),
    "16 values a key": dict(linear_num_value_heads=16),
    "1 head of all": dict(num_attention_heads=1, linear_num_value_heads=1),
    "kv as heads": dict(num_attention_heads=3, num_key_value_heads=3),
    "16 heads a kv": dict(num_attention_heads=16),
    "7 heads a kv": dict(num_attention_heads=7),
    "all rotated": _rope(1.0),
    "2 dims rotated": _rope(2 / 256),
    "base 1": _rope(130 / 256, 1.0),
    "DeltaNet only": dict(num_hidden_layers=1, layer_types=["linear_attention"]),
    "attention first": dict(layer_types=["full_attention", "linear_attention"]),
    "wide shared": dict(shared_expert_intermediate_size=448),
    "wide routed": dict(moe_intermediate_size=320),
    "vocabulary of 3": dict(vocab_size=3),
    "vocabulary of 301": dict(vocab_size=301),
    "vocabulary of 1025": dict(vocab_size=1025),
    "hidden 64": dict(hidden_size=64),
    "hidden 320": dict(hidden_size=320),
    "hidden 4096": dict(hidden_size=4096),
}
ON_SIM = ("2 experts, top 1", "16 values a key", "7 heads a kv", "all rotated", "vocabulary of 301")


@pytest.mark.parametrize("name", SHAPES)
def test_every_route_at_the_edges(device: str, tmp_path: Path, name: str) -> None:
    """forward, a step, verify, commit and a context that is just large enough; top_logprobs."""
    if emulated(device) and name not in ON_SIM:
        pytest.skip("sim: five shapes, each at another kind of edge")
    shape = BASE | SHAPES[name]
    folder = make_fixtures.write_checkpoint(tmp_path / "model", "mlx4", seed=3, **shape)
    vocab = shape["vocab_size"]
    ids = np.random.default_rng(5).integers(0, vocab, 36).astype(np.uint32)
    want, _ = reference.Model.load(folder).forward(ids)
    session = _core.Session(fresh_engine(folder, device, True, 37))

    def close(got: np.ndarray, first: int, last: int) -> None:
        assert np.abs(got - want[first:last]).max() <= 1e-4

    close(session.forward(ids[:24]), 0, 24)
    session.sync(ids[:25])
    close(session.logits()[None], 24, 25)
    close(session.verify(ids[25:]), 25, 36)
    session.commit(11)
    session.set_sampling(logprobs=20)
    drawn = session.step()
    close(session.logits()[None], 35, 36)
    ranked = np.argsort(-want[35], kind="stable")[:20]
    assert drawn.id == ranked[0]
    assert [token for token, _ in drawn.top] == ranked.tolist()
    with pytest.raises(ValueError, match="the context is full: 37 of 37"):
        session.step()
