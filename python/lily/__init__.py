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
from lily.engine import Engine
from lily.messages import ToolCall
from lily.results import Completion, Timings, Token, Usage
from lily.sampling import SamplingParams
from lily.stream import Stream
from lily.template import TemplateError

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
    "Stream",
    "TemplateError",
    "Timings",
    "Token",
    "ToolCall",
    "Usage",
    "__version__",
    "devices",
]
