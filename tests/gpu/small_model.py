"""Every route of the small model on a GPU, for compute-sanitizer: prefill, decode, verify, sampling.

compute-sanitizer --tool memcheck python tests/gpu/small_model.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from lily import _core
from lily.checkpoint import plan, read_checkpoint
from lily.engine import load_core

CALM = Path(__file__).resolve().parent.parent / "data/mlx4_calm"


def main() -> None:
    ids = np.random.default_rng(0).integers(0, 2000, 300).astype(np.uint32)
    for exact in (False, True):
        loaded = plan(read_checkpoint(CALM))
        session = _core.Session(load_core(loaded, "cuda", exact, 1024, loaded.config.vocab))
        session.sync(ids[:280], snapshot_at=[100])
        session.set_sampling(
            temperature=1.0, top_k=20, top_p=0.95, presence=1.5, seed=1, logprobs=5
        )
        drawn = [session.step().id for _ in range(4)]
        session.verify(ids[280:285])
        session.commit(3)
        session.rewind(150)
        session.score(ids[150:200], ids[151:201])
        if not np.isfinite(session.forward(ids[200:230])).all():
            sys.exit("logits are not finite")
        print("exact" if exact else "bf16", drawn)


if __name__ == "__main__":
    main()
