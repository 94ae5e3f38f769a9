"""The compiled core of lily: devices, kernels, engine."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class LilyError(RuntimeError):
    pass

class DeviceError(LilyError):
    pass

class CheckpointError(LilyError):
    pass

class Cancelled(LilyError):
    pass

class DeviceStatus:
    """Whether a device exists here, or why not."""

    @property
    def name(self) -> str: ...

    @property
    def available(self) -> bool: ...

    @property
    def description(self) -> str: ...

def metal_files() -> list[str]:
    """The kernel files that Apple's compiler is given."""

def metal_source(file: str, exact: bool, tensor: bool = False) -> str:
    """Such a file's text with its headers in place; see LILY_METAL_SOURCE."""

def devices() -> list[DeviceStatus]:
    """The devices lily knows, with the reason where one is missing."""

class KernelBuffer:
    """Device memory of a Kernels object."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def write(self, offset: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def read(self, offset: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

class Kernels:
    """Single ops by name on one device, for tests and benchmarks."""

    def __init__(self, device: str, exact: bool) -> None: ...

    @property
    def description(self) -> str: ...

    def buffer(self, nbytes: int, label: str) -> KernelBuffer: ...

    def run(self, calls: Sequence[tuple[str, Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]]]], reuse: bool = False, times: int = 1) -> list[list[int]]: ...

    def time(self, calls: Sequence[tuple[str, Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]]]], times: int) -> float:
        """
        Seconds of one run of the calls as one program, the mean of `times` replays.
        """

    def cancel(self, on: bool = True) -> None:
        """
        From any thread: ends a run in progress, and those that follow until it is taken back.
        """

    def touched(self, calls: Sequence[tuple[str, Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]]]]) -> list[list[list[int]]]:
        """
        On sim, of each launch, of each argument, unbound range and Step: bytes read and written,
        every access counted, then the same with every byte counted once.
        """

    def command_buffers(self, calls: Sequence[tuple[str, Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]], Sequence[tuple[KernelBuffer, int, int, str]]]]) -> tuple[list[int], list[float]]: ...

    def run_library(self, path: str, calls: Sequence[tuple[str, Sequence[tuple[KernelBuffer, int, int, str]], Sequence[str], Sequence[int]]]) -> list[list[int]]: ...

class MemoryTable:
    """Bytes by purpose."""

    @property
    def weights(self) -> int: ...

    @property
    def state(self) -> int: ...

    @property
    def kv_per_block(self) -> int: ...

    @property
    def decode_scratch(self) -> int: ...

    @property
    def prefill_scratch(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def context(self) -> int:
        """Tokens of one session at most; 0: the weights do not fit."""

class SampledToken:
    """A drawn token."""

    @property
    def id(self) -> int: ...

    @property
    def logprob(self) -> float:
        """Of the raw model distribution."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """(id, log-probability) of the most likely alternatives."""

class Engine:
    """A loaded model; immutable, shared by its sessions."""

    @property
    def device(self) -> str: ...

    @property
    def device_description(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    @property
    def max_context(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def allocated(self) -> int: ...

    def memory(self) -> MemoryTable: ...

    def close(self) -> None: ...

def load_engine(device: str, exact: bool, config: dict[str, Any], files: Sequence[str], linears: Sequence[tuple[int, str, str, int, int, str, int, int, int, tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int]]], vectors: Sequence[tuple[int, str, str, str, bool, tuple[int, int, int]]], max_context: int, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Loads weights from a validated table of file ranges; see lily.engine."""

def memory_table(device: str, exact: bool, config: dict[str, Any], files: Sequence[str], linears: Sequence[tuple[int, str, str, int, int, str, int, int, int, tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int]]], vectors: Sequence[tuple[int, str, str, str, bool, tuple[int, int, int]]]) -> MemoryTable:
    """What load_engine would take; reads no weights."""

class RecordedLaunch:
    """A launch that was written down."""

    @property
    def op(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def params(self) -> bytes:
        """The op's struct of kernels.h."""

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Threadgroups in x, y, z; threads of each."""

    @property
    def level(self) -> int:
        """Launches that it has to follow, one after another."""

    @property
    def flops(self) -> float:
        """Of ops that can be bound by them, else 0."""

    @property
    def args(self) -> list[tuple[int, str, int, str, int, str]]:
        """
        (number and label of the buffer, byte offset, dtype, elements, access) of each.
        """

    @property
    def unbound(self) -> list[tuple[int, str, int, str, int, str]]:
        """Ranges reached through addresses."""

    @property
    def step(self) -> list[tuple[int, str, int, str, int, str]]:
        """The session's Step, where the kernel takes it."""

def record_passes(device: str, exact: bool, config: dict[str, Any], files: Sequence[str], linears: Sequence[tuple[int, str, str, int, int, str, int, int, int, tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int]]], vectors: Sequence[tuple[int, str, str, str, bool, tuple[int, int, int]]], context: int) -> tuple[list[list[RecordedLaunch]], list[RecordedLaunch]]:
    """
    (launches of each prefill chunk of a prompt of `context` tokens, those of the step after it),
    as a session on such a device would submit them; needs neither the device nor the weights.
    """

class Session:
    """
    One timeline of tokens on an Engine. One thread at a time: a second one gets LilyError.
    """

    def __init__(self, engine: Engine) -> None: ...

    def sync(self, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, snapshot_at: Sequence[int] = []) -> int:
        """
        Makes the timeline `ids` (uint32 [n]); returns how many leading tokens were reused.

        Prefill is split at snapshot_at and a snapshot kept at each. Ctrl-C and cancel() leave the
        session at the prefix that was done.
        """

    def step(self, allowed: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> SampledToken:
        """
        Draws the next token and appends it. allowed: uint32 [(vocab + 31) / 32], one bit per id.
        """

    def rewind(self, position: int) -> None:
        """Cuts the timeline to `position` tokens: nearest snapshot, then replay."""

    def snapshot(self) -> None:
        """Keeps the present position for sync and rewind."""

    def cancel(self) -> None:
        """From any thread: ends a running call within one step or chunk."""

    def set_sampling(self, *, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0, seed: int = 0, logprobs: int = 0, bias: Sequence[tuple[int, float]] = []) -> None:
        """For the following steps; values are checked in lily.engine."""

    def logits(self) -> NDArray[numpy.float32]:
        """
        float32 [vocab] of the next token, or of the one that the last step returned.
        """

    def forward(self, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]:
        """Appends ids; float32 [n, vocab] logits after each, n <= 512."""

    def score(self, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], targets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[NDArray[numpy.float32], NDArray[numpy.uint32]]:
        """
        Appends ids; (log-probability of each target, most likely id) after each.
        """

    def verify(self, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]:
        """
        float32 [n, vocab] logits of up to 16 further tokens; changes nothing visible.
        """

    def commit(self, n: int) -> None:
        """Appends the first n verified tokens."""

    def recurrent_state(self) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
        """
        (conv float32 [layers, 3, channels], delta float32 [layers, Hv, Dv, Dk]) after all tokens.
        """

    @property
    def tokens(self) -> NDArray[numpy.uint32]:
        """uint32 [n]: the timeline."""

    @property
    def position(self) -> int:
        """Tokens in the timeline."""

    @property
    def snapshots(self) -> list[int]:
        """Positions of the kept snapshots."""

def variants() -> list[tuple[str, str]]:
    """(op, pipeline) of every kernel."""
