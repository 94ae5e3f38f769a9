"""Owns the training: batches, optimisers, schedule, held-out checks, what is written at the end.

    python train.py --minutes 8.5 --out DIR                        a whole plan
    python train.py --minutes 7 --span 0.3 1 --weights W --out DIR  its last part, from weights W
    python train.py --minutes 7 --span 0.3 1 --state S --out DIR    the same, with the optimiser
    python train.py --shares 9 5 3 30 2 6 24 10 30 9 6 24 ..        another mixture of the tasks
    python train.py --smoke --out DIR                               a minute: does all of it run?

The rates follow the share of the plan that is done, and the share follows the clock, so that a run
uses its minutes whole. From QUANTISE on the forward pass sees rounded weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import encode
import held_out
import layout as lay
import model
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import data

STARTED = time.monotonic()
DECAY_FROM, QUANTISE = 0.3, 0.66
MUON, TABLES, GATES, VECTORS = 0.02, 4e-3, 2e-3, 3e-3  # learning rates
MUON_DECAY, MOMENTUM, BETAS = 0.05, 0.95, (0.9, 0.98)
MTP_SHARE, BALANCE_SHARE = 0.3, 0.01
WARM_UP = 100  # steps after a start without optimiser state
LAST = 6  # seconds for the last check and the files
SHARD_ROWS = 256
SHARD_BYTES = 12 << 20
DOCUMENTS = 48  # of a row at most


# ---- data ---------------------------------------------------------------------------------------

_encoder: encode.Encoder | None = None


def make_rows(shares: tuple[int, ...], seed: str) -> encode.Rows:
    """One shard of training rows, in a worker process."""
    global _encoder
    _encoder = _encoder or encode.Encoder()
    rng = random.Random(seed)
    documents: list[encode.Encoded] = []
    total = 0
    while total < SHARD_ROWS * encode.ROW:
        documents.append(_encoder.encode(data.draw(rng, held=False, shares=shares)))
        total += len(documents[-1].ids)
    return encode.pack(documents)


class Feed:
    """Rows as the workers make them; batches go through what there is, again when it ends."""

    def __init__(
        self, pool: Any, shares: tuple[int, ...], seed: str, shards: int, batch: int, device: str
    ) -> None:
        self.make = functools.partial(make_rows, shares)
        self.batch, self.device = batch, device
        size = (shards + 8) * (SHARD_ROWS + 16)
        self.ids = np.zeros((size, encode.ROW), np.int16)
        self.weights = np.zeros((size, encode.ROW), np.uint8)
        self.position = np.zeros((size, encode.ROW), np.int16)
        self.ready = self.at = self.epochs = 0
        self.failure: BaseException | None = None
        seeds = [f"{seed} {i}" for i in range(shards)]
        self.thread = threading.Thread(target=self._collect, args=(pool, seeds), daemon=True)
        self.thread.start()

    def _collect(self, pool: Any, seeds: list[str]) -> None:
        try:
            for rows in pool.imap_unordered(self.make, seeds):
                end = self.ready + len(rows.ids)
                if end > len(self.ids):
                    return
                self.ids[self.ready : end] = rows.ids
                self.weights[self.ready : end] = rows.weights
                self.position[self.ready : end] = rows.position
                self.ready = end
        except BaseException as error:
            self.failure = error

    def wait(self, rows: int) -> None:
        while self.ready < rows:
            if self.failure:
                raise self.failure
            time.sleep(0.05)

    def next(self) -> tuple[Tensor, ...]:
        if self.failure:
            raise self.failure
        if self.at + self.batch > self.ready:
            self.at, self.epochs = 0, self.epochs + 1
        rows = slice(self.at, self.at + self.batch)
        self.at += self.batch
        weights = encode.WEIGHT[self.weights[rows]]
        return to_device(self.ids[rows], self.position[rows], weights, self.device)


def to_device(ids: Any, position: Any, weights: Any, device: str) -> tuple[Tensor, ...]:
    """(ids, position, bounds, weights) on the device; bounds has always the same length."""
    starts = np.flatnonzero(position.reshape(-1) == 0)
    bounds = np.full(len(ids) * DOCUMENTS + 1, ids.size, np.int32)
    if len(starts) >= len(bounds):
        raise RuntimeError(f"{len(starts)} documents in a batch, {len(bounds) - 1} are allowed")
    bounds[: len(starts)] = starts
    arrays = (ids.astype(np.int64), position.astype(np.int64), bounds, weights)
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    if device == "cuda":
        return tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)
    return tuple(tensors)


# ---- optimisers ---------------------------------------------------------------------------------


def orthogonal(g: Tensor) -> Tensor:
    """Near-orthogonal matrices [n, r, c] in the direction of g (five Newton-Schulz steps)."""
    x = g.bfloat16() if g.is_cuda else g
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None] + 1e-7).to(x.dtype)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return (x.mT if turned else x).float()


class Optimiser:
    """Muon for the matrices inside, Adam for tables, gates and vectors."""

    def __init__(self, parameters: model.Parameters) -> None:
        self.parameters = parameters
        self.groups = parameters.muon_groups()
        self.adam_end = self.groups[0][0]
        flat = parameters.flat
        self.momentum = torch.zeros_like(flat[4])
        self.first = {bits: torch.zeros_like(x) for bits, x in self._adam(flat).items()}
        self.second = {bits: torch.zeros_like(x) for bits, x in self._adam(flat).items()}
        self.steps = 0  # since the state was empty

    def _adam(self, flat: dict[int, Tensor]) -> dict[int, Tensor]:
        return {4: flat[4][: self.adam_end], 8: flat[8], 16: flat[16]}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.steps += 1
        rate *= min(1.0, self.steps / WARM_UP)
        flat = self.parameters.flat
        grads = {bits: x.grad for bits, x in flat.items()}
        adam = self._adam(grads)
        norm = torch.stack([g.norm() for g in adam.values()]).norm()
        clip = (1.0 / norm).clamp(max=1.0)
        values = self._adam({bits: x.data for bits, x in flat.items()})
        for bits, base in ((4, TABLES), (8, GATES), (16, VECTORS)):
            g = adam[bits] * clip
            first, second = self.first[bits], self.second[bits]
            first.lerp_(g, 1 - BETAS[0])
            second.lerp_(g.square(), 1 - BETAS[1])
            scale = (1 - BETAS[1] ** self.steps) ** 0.5
            factor = -rate * base * scale / (1 - BETAS[0] ** self.steps)
            values[bits].addcdiv_(first, second.sqrt().add_(1e-8 * scale), value=factor)
        matrices, grad = flat[4].data[self.adam_end :], grads[4][self.adam_end :]
        momentum = self.momentum[self.adam_end :]
        momentum.lerp_(grad, 1 - MOMENTUM)
        ahead = grad.lerp(momentum, MOMENTUM)
        matrices.mul_(1 - rate * MUON * MUON_DECAY)
        for at, count, rows, columns in self.groups:
            part = slice(at - self.adam_end, at - self.adam_end + count * rows * columns)
            update = orthogonal(ahead[part].view(count, rows, columns))
            scale = max(1.0, rows / columns) ** 0.5
            matrices[part].add_(update.reshape(-1), alpha=-rate * MUON * scale)
        for x in flat.values():
            x.grad = None

    def state(self) -> dict[str, Any]:
        tensors = {"momentum": self.momentum, "first": self.first, "second": self.second}
        return {**tensors, "steps": self.steps, "flat": self.parameters.flat}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for bits, x in self.parameters.flat.items():
            x.copy_(state["flat"][bits])
        self.momentum.copy_(state["momentum"])
        for name in ("first", "second"):
            for bits, x in getattr(self, name).items():
                x.copy_(state[name][bits])
        self.steps = state["steps"]


def rate_at(share: float) -> float:
    return 1.0 if share < DECAY_FROM else max(0.02, (1 - share) / (1 - DECAY_FROM))


# ---- held-out checks ----------------------------------------------------------------------------


class Check:
    """Accuracy on held-out samples, teacher-forced: an exact answer counts when every one of its
    tokens is the likeliest, which is when greedy decoding writes it."""

    def __init__(self, rows: encode.Rows, batch: int, device: str) -> None:
        self.rows, self.batch, self.device = rows, batch, device

    def run(self, net: model.Model, weights: model.Weights) -> dict[str, Any]:
        hits, ahead, losses = [], [], []
        for at in range(0, len(self.rows.ids), self.batch):
            part = slice(at, at + self.batch)
            ids, position = (
                self._padded(self.rows.ids[part]),
                self._padded(self.rows.position[part]),
            )
            position[len(self.rows.ids[part]) :] = np.arange(encode.ROW)
            codes = self._padded(self.rows.weights[part])
            own = (codes == encode.OWN).astype(np.float32)
            out = net.losses(weights, *to_device(ids, position, own, self.device))
            losses.append((out["loss"].item(), out["mtp"].item(), float(out["first"].sum())))
            hits.append(out["hit"].cpu().numpy())
            ahead.append(out["mtp_hit"].cpu().numpy())
        total = sum(n for *_, n in losses)
        scores: dict[str, list[tuple[bool, int, int, int, int]]] = defaultdict(list)
        hit, mtp = np.concatenate(hits), np.concatenate(ahead)
        for row, start, end, task, exact in self.rows.documents:
            own = self.rows.weights[row] == encode.OWN
            at = np.arange(start, end - 1)
            at = at[own[at + 1]]
            two = np.arange(start, end - 2)
            two = two[own[two + 2]]
            good = hit[row, at]
            scores[task if exact else task + " (tokens)"].append(
                (bool(good.all()), int(good.sum()), len(at), int(mtp[row, two].sum()), len(two))
            )
        tasks: dict[str, float] = {}
        acceptance: dict[str, float] = {}
        for task, rows in sorted(scores.items()):
            whole = sum(r[0] for r in rows) / len(rows)
            tokens = sum(r[1] for r in rows) / max(1, sum(r[2] for r in rows))
            tasks[task] = round(tokens if task.endswith("(tokens)") else whole, 4)
            acceptance[task] = round(sum(r[3] for r in rows) / max(1, sum(r[4] for r in rows)), 4)
        every = [r for rows in scores.values() for r in rows]
        return {
            "held-out loss": round(sum(a * n for a, _, n in losses) / total, 4),
            "held-out mtp loss": round(sum(b * n for _, b, n in losses) / total, 4),
            "accuracy": tasks,
            "mtp acceptance": acceptance,
            "mtp acceptance over all": round(
                sum(r[3] for r in every) / sum(r[4] for r in every), 4
            ),
        }

    def _padded(self, rows: Any) -> Any:
        out = np.zeros((self.batch, encode.ROW), rows.dtype)
        out[: len(rows)] = rows
        return out


# ---- what is written ----------------------------------------------------------------------------


def write_weights(parameters: model.Parameters, folder: Path) -> None:
    """bf16 in files of at most SHARD_BYTES, each whole or not at all."""
    shard: dict[str, Tensor] = {}
    number = size = 0

    def flush() -> None:
        nonlocal number, size
        number += 1
        file = folder / f"weights-{number}.safetensors"
        save_file(shard, str(file) + ".part")
        os.replace(str(file) + ".part", file)
        shard.clear()
        size = 0

    for spec in parameters.specs:
        if size + 2 * spec.size > SHARD_BYTES:
            flush()
        shard[spec.name] = parameters.view(spec.name).detach().bfloat16().cpu().contiguous()
        size += 2 * spec.size
    flush()


@torch.no_grad()
def read_weights(parameters: model.Parameters, folder: Path) -> None:
    """What write_weights wrote, or the values of a folder of the MLX form."""
    if (folder / "config.json").exists():
        read_mlx(parameters, folder)
        return
    found: set[str] = set()
    for file in sorted(folder.glob("weights-*.safetensors")):
        for name, value in load_file(file).items():
            parameters.view(name).copy_(value)
            found.add(name)
    missing = {spec.name for spec in parameters.specs} - found
    if missing:
        raise RuntimeError(f"{folder} lacks {len(missing)} tensors, {sorted(missing)[0]} first")


@torch.no_grad()
def read_mlx(parameters: model.Parameters, folder: Path) -> None:
    """The values that the codes of a folder of the MLX form stand for."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    for spec in parameters.specs:
        name = spec.name if spec.name.startswith("mtp.") else "language_model." + spec.name
        value = stored[name]
        if spec.bits != 16:
            words, module = value.to(torch.int64), name.removesuffix(".weight")
            width = 32 * words.shape[-1] // spec.shape[-1]
            codes = words[..., None] >> torch.arange(0, 32, width) & ((1 << width) - 1)
            scale, bias = (stored[f"{module}.{part}"].float() for part in ("scales", "biases"))
            groups = codes.reshape(*scale.shape, lay.GROUP)
            value = scale[..., None] * groups + bias[..., None]
        parameters.view(spec.name).copy_(value.reshape(spec.shape))


def flash_works() -> bool:
    """Whether the flash kernel gives what the masked one does, forwards and backwards."""
    generator = torch.Generator("cuda").manual_seed(1)
    position = torch.cat([torch.arange(n) for n in (700, 1, 1347, 2000, 48)]).view(2, 2048).cuda()
    starts = (position.flatten() == 0).nonzero().flatten().int()
    bounds = torch.full((64,), 4096, dtype=torch.int32, device="cuda")
    bounds[: len(starts)] = starts
    q, k, v, grad = (
        torch.randn(2, 2048, lay.HEADS, 256, device="cuda", generator=generator).bfloat16()
        for _ in range(4)
    )
    results = []
    for attention in (model.masked_attention, model.flash_attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        try:
            out = attention(*inputs, position, bounds)
            out.backward(grad)
        except Exception as error:
            print("flash attention:", error, flush=True)
            return False
        results.append([out.detach(), *(x.grad for x in inputs)])
    worst = [
        ((a.float() - b.float()).abs().max() / a.float().abs().max()).item()
        for a, b in zip(*results, strict=True)
    ]
    print("flash against masked attention:", [f"{x:.1e}" for x in worst], flush=True)
    return max(worst) < 0.02


# ---- the run ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--span", type=float, nargs=2, default=(0.0, 1.0))
    parser.add_argument("--state", type=Path)
    parser.add_argument("--weights", type=Path, help="an earlier run, or a folder in MLX form")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24, help="rows of 2,048 tokens in a step")
    parser.add_argument("--shards", type=int, default=640, help="of 256 rows, made meanwhile")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--shares", type=int, nargs=len(data.TASKS), default=data.SHARES, help="of data.py's tasks"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.smoke:
        a.shards = min(a.shards, a.workers)
    # The workers begin before the device is touched: they are copies of this process.
    pool = multiprocessing.get_context("fork").Pool(a.workers, os.nice, (10,))
    checks = pool.apply_async(held_out.rows, (0.05 if a.smoke else 1.0,))
    feed = Feed(pool, tuple(a.shares), f"{a.seed} {a.span[0]}", a.shards, a.rows, a.device)
    run(a, feed, checks)
    pool.terminate()


def run(a: argparse.Namespace, feed: Feed, checks: Any) -> None:
    cuda = a.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.set_float32_matmul_precision("high")
    parameters = model.Parameters(a.device, a.seed)
    optimiser = Optimiser(parameters)
    net, fake = model.Model(), model.fake_quantised
    if cuda:
        if flash_works():
            net.attention = torch.compiler.disable(model.flash_attention)
        net.compile()
        fake = torch.compile(fake, dynamic=False)
    saved = a.state / "state.pt" if a.state else None
    if saved and saved.exists():
        optimiser.load(torch.load(saved, map_location=a.device))
        print(f"goes on after {optimiser.steps} steps", flush=True)
    elif a.weights:
        read_weights(parameters, a.weights)
        print(f"goes on from {a.weights}, the optimiser begins anew", flush=True)
    elif a.span[0] > 0:
        raise SystemExit(f"--span begins at {a.span[0]}, but there is neither state nor weights")
    feed.wait(2 * a.rows)
    print(f"{seconds():.0f} s: data begins to come, {feed.ready} rows", flush=True)

    curve = (a.out / f"curve-{a.span[0]:g}.jsonl").open("a")

    def note(**line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        curve.write(text + "\n")
        curve.flush()

    def step(share: float) -> dict[str, Tensor]:
        weights = parameters.weights(dtype, share >= QUANTISE, fake)
        out = net.losses(weights, *feed.next())
        total = out["loss"] + MTP_SHARE * out["mtp"] + BALANCE_SHARE * out["balance"]
        total.backward()
        optimiser.step(rate_at(share))
        return out

    def save() -> None:
        write_weights(parameters, a.out)
        if saved:
            saved.parent.mkdir(parents=True, exist_ok=True)
            torch.save(optimiser.state(), str(saved) + ".part")
            os.replace(str(saved) + ".part", saved)

    def checked(share: float) -> None:
        quantised = share >= QUANTISE
        result = check.run(net, parameters.weights(dtype, quantised, fake))
        note(share=round(share, 4), seconds=round(seconds(), 1), rounded=quantised, **result)

    begin, end = a.span
    # Everything is compiled before the clock of the schedule starts, rounding too.
    step(begin)
    if end > QUANTISE:
        parameters.weights(dtype, True, fake)["lm_head.weight"].float().sum().backward()
        parameters.flat[4].grad = None
    check = Check(checks.get(), a.rows, a.device)
    checked(begin)
    print(f"{seconds():.0f} s: compiled, {feed.ready} rows", flush=True)
    started, count, last = seconds(), 0, seconds()
    stop = started + 15 if a.smoke else a.minutes * 60 - LAST
    next_check = next_write = started + 60
    share = begin
    while (now := seconds()) < stop:
        share = begin + (end - begin) * (now - started) / (stop - started)
        out = step(share)
        count += 1
        if count % 50 == 0:
            parts = {name: round(out[name].item(), 4) for name in ("loss", "mtp", "balance")}
            if not all(np.isfinite(list(parts.values()))):
                raise SystemExit(f"step {optimiser.steps}: {parts}")
            speed = 50 * a.rows * encode.ROW / (seconds() - last)
            last = seconds()
            note(
                share=round(share, 4), step=optimiser.steps, rate=round(rate_at(share), 4), **parts,
                tokens_per_second=round(speed), rows=feed.ready, epochs=feed.epochs,
            )  # fmt: skip
        if now > next_check and not a.smoke:
            next_check = now + 90
            checked(share)
            last = seconds()
        if now > next_write and not a.smoke:
            next_write = now + 120
            save()
            last = seconds()
    checked(end if not a.smoke else 1.0)
    save()
    tokens = count * a.rows * encode.ROW
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    print(
        f"{seconds():.0f} s: {count} steps, {tokens / 1e6:.0f} M tokens, {feed.epochs} epochs of"
        f" {feed.ready} rows, {memory:.1f} GiB",
        flush=True,
    )


def seconds() -> float:
    return time.monotonic() - STARTED


if __name__ == "__main__":
    main()
