"""lily: runs Qwen3.6-35B-A3B and its family locally with its own fused kernels."""

from lily._core import DeviceError, DeviceStatus, LilyError, devices
from lily._core import CheckpointError as CheckpointError

__all__ = ["CheckpointError", "DeviceError", "DeviceStatus", "LilyError", "devices"]
