"""Owns the comparison of lily with its peers and with itself, teacher-forced on held-out samples.

    python peers.py mlx FOLDER [--share 0.03]           against mlx-lm, where that is installed
    python peers.py greedy FOLDER                       the goldens as mlx-lm answers them
    python peers.py transformers FOLDER [--share 0.03]  against transformers (original form)
    python peers.py routes FOLDER [--share 0.03]        tiles against rows
    python peers.py sim FOLDER                          cpu against sim, a few short samples
    python peers.py cuda FOLDER [--share 0.03]          cpu against cuda; sim against cuda, as few
    python peers.py ahead FOLDER [--share 0.03]         the layer that looks one token further, in
                                                        PyTorch: lily does not use it

prints JSON objects; top-1: share of positions at which both find the same token likeliest, over
all, and over those that the model has to say. (What a user says next is a matter of chance: of the
digits of a number all are as likely, and rounding decides which one is first; where logits are of
bf16, as mlx-lm's, several often are. Ties count: the first's likeliest is one of the second's. The
largest lead that was lost: by so many nats one finds its likeliest likelier than the other's.)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encode
import held_out
import make_goldens
import numpy as np
from numpy.typing import NDArray

import lily

Logits = NDArray[np.float32]  # [T, 4096]
Model = Callable[[NDArray[np.uint32]], Logits]


def documents(share: float) -> list[encode.Encoded]:
    encoder = encode.Encoder()
    return [encoder.encode(sample) for sample in held_out.samples(encoder, share, seed=3)]


# ---- lily ---------------------------------------------------------------------------------------


def tiles(engine: lily.Engine) -> Model:
    def run(ids: NDArray[np.uint32]) -> Logits:
        session = engine.session()
        return np.concatenate(
            [session.forward(ids[at : at + 512]) for at in range(0, len(ids), 512)]
        )

    return run


def rows(engine: lily.Engine) -> Model:
    """As decoding computes it: token by token."""

    def run(ids: NDArray[np.uint32]) -> Logits:
        session, out = engine.session(), []
        for n in range(1, len(ids) + 1):
            session.sync(ids[:n])
            out.append(session.logits())
        return np.stack(out)

    return run


# ---- peers --------------------------------------------------------------------------------------


def mlx(folder: Path, bf16: bool) -> Model:
    """mlx-lm on its CPU. In fp32; or with bf16 between the operations and sums in fp32, as its
    Metal kernels have them and its CPU kernels have not."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models import qwen3_next
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    if bf16:

        def widened(operation: Any, places: int) -> Any:
            def call(*given: Any, **options: Any) -> Any:
                kind = given[0].dtype
                wide = [x.astype(mx.float32) for x in given[:places]]
                return operation(*wide, *given[places:], **options).astype(kind)

            return call

        def wide_scales(operation: Any) -> Any:
            def call(
                x: Any, weight: Any, scales: Any = None, biases: Any = None, **rest: Any
            ) -> Any:
                f32 = mx.float32
                done = operation(
                    x.astype(f32), weight, scales.astype(f32), biases.astype(f32), **rest
                )
                return done.astype(x.dtype)

            return call

        mx.quantized_matmul = wide_scales(mx.quantized_matmul)
        mx.gather_qmm = wide_scales(mx.gather_qmm)
        attend = widened(mx.fast.scaled_dot_product_attention, 3)
        qwen3_next.scaled_dot_product_attention = (
            lambda q, k, v, cache=None, scale=1.0, mask=None, **_: attend(
                q, k, v, scale=scale, mask=mask
            )
        )
    else:
        promote = lambda x: x.astype(mx.float32) if x.dtype == mx.bfloat16 else x  # noqa: E731
        model.update(tree_map(promote, model.parameters()))

    def run(ids: NDArray[np.uint32]) -> Logits:
        out = model(mx.array(ids)[None], cache=make_prompt_cache(model))
        return np.array(out.astype(mx.float32))[0]

    return run


def greedy(folder: Path) -> dict[str, Any]:
    """mlx-lm from end to end, its tokenizer and its rendering of the template too."""
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(folder))
    same, different = 0, []
    for golden in json.loads(make_goldens.GOLDENS.read_text()):
        if "prompt" in golden:
            ids = tokenizer.encode(golden["prompt"])
        else:
            ids = tokenizer.apply_chat_template(
                golden["messages"],
                tools=golden["tools"] or None,
                enable_thinking=golden["thinking"],
                add_generation_prompt=True,
                return_dict=False,
            )
        said = [part.token for part in stream_generate(model, tokenizer, ids, max_tokens=400)]
        wanted = golden["answer"]["tokens"]
        if said[: len(wanted)] == wanted and len(said) <= len(wanted) + 1:  # with its end token
            same += 1
        else:
            different.append([golden["task"], tokenizer.decode(said)])
    return {"answers as the goldens": same, "different": different}


def transformers(folder: Path) -> Model:
    """In fp32, the weights as the original checkpoint has them."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    text = json.loads((folder / "config.json").read_text())["text_config"]
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text)).float().eval()
    stored = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "model."): value.float()
        for name, value in stored.items()
    }
    model.load_state_dict(renamed)

    def run(ids: NDArray[np.uint32]) -> Logits:
        with torch.no_grad():
            found: Logits = model(torch.tensor(ids.astype(np.int64))[None]).logits[0].numpy()
        return found

    return run


def ahead(folder: Path, share: float) -> dict[str, Any]:
    """Held-out checks as training makes them, with the values of a folder of the MLX form."""
    import model
    import torch
    import train

    parameters = model.Parameters("cpu")
    train.read_weights(parameters, folder)
    check = train.Check(held_out.rows(share), 1, "cpu")
    with torch.no_grad():
        return check.run(model.Model(), parameters.weights(torch.float32, False))


# ---- comparing ----------------------------------------------------------------------------------


def log_softmax(x: Logits) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    y -= y.max(-1, keepdims=True)
    return y - np.log(np.exp(y).sum(-1, keepdims=True))


def compare(name: str, pairs: Iterator[tuple[encode.Encoded, Logits, Logits]]) -> dict[str, Any]:
    """pairs: of each document what the first and the second say after each token."""
    count = 0
    same: list[NDArray[np.bool_]] = []
    tied: list[NDArray[np.bool_]] = []
    same_own: list[NDArray[np.bool_]] = []
    divergence = difference = lead = 0.0
    losses: list[list[float]] = [[], []]
    for document, first, second in pairs:
        p, q = log_softmax(first), log_softmax(second)
        same.append(p.argmax(-1) == q.argmax(-1))
        divergence += float((np.exp(p) * (p - q)).sum())
        difference = max(difference, float(np.abs(first - second).max()))
        found = np.take_along_axis(second, first.argmax(-1)[:, None], 1)[:, 0]
        tied.append(found == second.max(-1))
        count += len(p)
        mine, others = (np.take_along_axis(p, x.argmax(-1)[:, None], 1) for x in (p, q))
        lead = max(lead, float((mine - others).max()))
        own = np.flatnonzero(np.array(document.weights[1:]) == encode.OWN)
        same_own.append(same[-1][own])
        for kept, log in zip(losses, (p, q), strict=True):
            kept.extend(-log[own, np.array(document.ids)[own + 1]])
    return {
        "compared": name,
        "positions": count,
        "top-1": round(float(np.concatenate(same).mean()), 5),
        "top-1, ties count": round(float(np.concatenate(tied).mean()), 5),
        "positions to say": len(losses[0]),
        "top-1 of these": round(float(np.concatenate(same_own).mean()), 5),
        "largest lead that was lost": float(f"{lead:.3g}"),
        "mean KL": float(f"{divergence / count:.3g}"),
        "largest difference of logits": float(f"{difference:.3g}"),
        "perplexity of each": [round(math.exp(sum(x) / len(x)), 4) for x in losses],
    }


def each(
    chosen: list[encode.Encoded], first: Model, second: Model
) -> Iterator[tuple[encode.Encoded, Logits, Logits]]:
    for document in chosen:
        ids = np.array(document.ids, np.uint32)
        yield document, first(ids), second(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "what",
        choices=("mlx", "greedy", "transformers", "routes", "sim", "cuda", "ahead"),
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.03)
    a = parser.parse_args()
    if a.what == "greedy":
        print(json.dumps(greedy(a.folder), indent=1))
        return
    if a.what == "ahead":
        print(json.dumps(ahead(a.folder, a.share)))
        return
    chosen = documents(a.share)

    def load(activations: str, device: str = "cpu") -> lily.Engine:
        return lily.Engine.load(a.folder, device=device, activations=activations)

    def report(name: str, first: Model, second: Model) -> None:
        print(json.dumps(compare(name, each(chosen, first, second))), flush=True)

    if a.what == "mlx":
        report("exact, mlx-lm in fp32", tiles(load("float32")), mlx(a.folder, False))
        report("bf16, mlx-lm as on Metal", tiles(load("bfloat16")), mlx(a.folder, True))
    elif a.what == "transformers":
        report("exact, transformers in fp32", tiles(load("float32")), transformers(a.folder))
        report("bf16, transformers in fp32", tiles(load("bfloat16")), transformers(a.folder))
    elif a.what == "routes":
        for mode in ("bfloat16", "float32"):
            report(f"tiles, rows, {mode}", tiles(load(mode)), rows(load(mode)))
    else:
        short = sorted(documents(0.1), key=lambda d: len(d.ids))[:240:20]
        if a.what == "sim":
            chosen = short
        for mode in ("bfloat16", "float32"):
            report(f"cpu, {a.what}, {mode}", tiles(load(mode)), tiles(load(mode, a.what)))
        if a.what == "cuda":
            chosen = short
            for mode in ("bfloat16", "float32"):
                report(f"sim, cuda, {mode}", tiles(load(mode, "sim")), tiles(load(mode, "cuda")))


if __name__ == "__main__":
    main()
