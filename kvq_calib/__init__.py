"""Calibrate KV-cache quantizers; see docs/architecture.md."""

import os

# PyTorch refuses deterministic products on a GPU otherwise, and looks once, at the first product of the process.
if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
