"""lily: runs Qwen3.6-35B-A3B and its family locally with its own fused kernels."""

from lily._core import (
    CheckpointError,
    DeviceError,
    DeviceStatus,
    LilyError,
    SampledToken,
    Session,
    devices,
)
from lily.engine import Completion, Engine, Token
from lily.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Completion",
    "DeviceError",
    "DeviceStatus",
    "Engine",
    "LilyError",
    "SampledToken",
    "SamplingParams",
    "Session",
    "Token",
    "__version__",
    "devices",
]
