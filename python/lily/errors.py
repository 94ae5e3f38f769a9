"""Owns nothing: the package's exception types, defined once in the compiled core."""

from lily._core import CheckpointError, DeviceError, LilyError

__all__ = ["CheckpointError", "DeviceError", "LilyError"]
