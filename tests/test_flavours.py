"""Every flavour of checkpoint through the whole engine against the numpy model; faults at run time."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import make_fixtures
import reference
from kernel_harness import emulated
from lily import _core
from model_harness import CALM, fresh_engine

IDS = np.random.default_rng(5).integers(0, 2000, 40).astype(np.uint32)


@pytest.fixture(scope="module")
def flavours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flavours")


def _folder(root: Path, flavour: str) -> Path:
    folder = root / flavour
    if not folder.exists():
        make_fixtures.write_checkpoint(folder, flavour, seed=3)
    return folder


@pytest.mark.parametrize("flavour", [f for f in make_fixtures.FLAVOURS if f != "hf"])
def test_logits_of_every_flavour_match_the_reference(
    device: str, flavours: Path, flavour: str
) -> None:
    """Prefill and decode, bits, groups, scale types and mixes of them."""
    if emulated(device) and flavour not in ("mlx4_f16", "mlx8_g32", "mlx_mixed", "mlx16"):
        pytest.skip("sim: four flavours reach every kernel variant")
    folder = _folder(flavours, flavour)
    want, _ = reference.Model.load(folder).forward(IDS)
    session = _core.Session(fresh_engine(folder, device, True, 256))
    assert np.abs(session.forward(IDS[:20]) - want[:20]).max() <= 1e-4
    for n in range(21, 24):
        session.sync(IDS[:n])
        assert np.abs(session.logits() - want[n - 1]).max() <= 1e-4


def test_the_original_layout_equals_its_conversion(device: str, flavours: Path) -> None:
    """HF bf16: norms + 1, other convolution and expert layout, mtp.* present: bitwise the same."""
    rows = []
    for flavour in ("hf", "mlx16"):
        session = _core.Session(fresh_engine(_folder(flavours, flavour), device, True, 256))
        rows.append(session.forward(IDS[:20]))
    assert np.array_equal(rows[0], rows[1])


def _patched(tmp_path: Path, name: str, bits: int, index: int = 0) -> Path:
    """mlx4_calm with one 16-bit value of a tensor replaced."""
    folder = tmp_path / "patched"
    shutil.copytree(CALM, folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])[name]
    at = 8 + size + entry["data_offsets"][0] + 2 * index
    raw[at : at + 2] = struct.pack("<H", bits)
    file.write_bytes(raw)
    return folder


@pytest.mark.parametrize("bits", [0x7FC0, 0xFF80], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.1.linear_attn.in_proj_z.scales",
        "language_model.model.layers.3.mlp.switch_mlp.up_proj.biases",
        "language_model.model.layers.2.linear_attn.A_log",
        "language_model.model.norm.weight",
        "language_model.model.layers.0.linear_attn.conv1d.weight",
    ],
)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, name: str, bits: int) -> None:
    folder = _patched(tmp_path, name, bits, 3)
    with pytest.raises(_core.CheckpointError, match="finite") as error:
        fresh_engine(folder, "cpu", True, 256)
    assert "model.safetensors" in str(error.value)
    assert name.rsplit(".", 1)[0] in str(error.value)


def test_logits_that_are_not_finite_are_a_fault_and_the_session_goes_on(
    device: str, tmp_path: Path
) -> None:
    """Finite weights that overflow for one token: DeviceError, then back at the snapshot."""
    name = "language_model.model.embed_tokens.scales"
    # Row 1999 of the embedding becomes huge: 256 / 64 = 4 scales a row.
    folder = _patched(tmp_path, name, 0x7F7F, 4 * 1999)
    model = fresh_engine(folder, device, True, 256)
    ids = np.minimum(IDS[:20], 1990)
    session = _core.Session(model)
    session.sync(ids, snapshot_at=[20])
    want = [session.step().id for _ in range(3)]
    session.sync(np.concatenate([ids, np.array([1999, 5], np.uint32)]))
    with pytest.raises(_core.DeviceError, match="finite"):
        session.step()
    assert session.position == 20
    session.sync(ids)
    assert [session.step().id for _ in range(3)] == want


def test_the_model_must_fit_the_memory(tmp_path: Path) -> None:
    """Refused before anything is allocated, with both numbers."""
    make_fixtures.write_checkpoint(
        tmp_path / "large",
        "mlx4",
        seed=None,
        num_experts=1024,
        hidden_size=8192,
        moe_intermediate_size=4096,
        num_hidden_layers=4,
    )
    with pytest.raises(_core.LilyError, match=r"the model needs \d+ bytes .* cpu has \d+ left"):
        fresh_engine(tmp_path / "large", "cpu", True, 256)
