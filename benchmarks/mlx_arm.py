"""One arm of generate.py on mlx-lm, in a Python of its own: seconds and tokens as a line of JSON.

    PYTHON benchmarks/mlx_arm.py MODEL CONTEXT

Needs mlx-lm and nothing of lily. generate_step hands out a token when it is on the host and the
next step submitted, which is where lily's arms stop the clock as well. The prompt is read once
before.
"""

from __future__ import annotations

import json
import sys
import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

STEPS = 64  # as lily.bench has it


def vocabulary(config: dict) -> int:
    return config.get("text_config", config)["vocab_size"]


def run(model: object, ids: mx.array, steps: int) -> tuple[list[float], list[int]]:
    """Seconds of the first token and of each step after it; the steps' tokens."""
    seconds, tokens, before = [], [], time.perf_counter()
    for token, _ in generate_step(ids, model, max_tokens=steps + 1):
        now = time.perf_counter()
        seconds.append(now - before)
        tokens.append(int(token))
        before = now
    return seconds, tokens[1:]


def main() -> None:
    folder, context = sys.argv[1], int(sys.argv[2])
    model, _, config = load(folder, return_config=True)
    vocab = vocabulary(config)
    ids = mx.array([(i * 2654435761 % 2**32) % vocab for i in range(context)])
    run(model, ids, 3)
    seconds, tokens = run(model, ids, STEPS)
    device = mx.default_device()
    about = mx.device_info() if hasattr(mx, "device_info") else {}
    print(
        json.dumps(
            {
                "device": f"{device}: {about.get('device_name', 'unknown')}",
                "driver": f"mlx {mx.__version__}",
                "seconds": seconds,
                "tokens": tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
