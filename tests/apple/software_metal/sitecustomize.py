"""Python starts with this: lily is what PYTHONPATH says, also where another one is installed editable."""

from __future__ import annotations

import sys

# scikit-build-core's finders for editable installations come before any path.
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
