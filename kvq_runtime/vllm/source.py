"""Find what the variable KVQ_CACHE names (`kvq_runtime/engines/source.py`), and check that vLLM can serve it."""

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvq_runtime.engines import source
from kvq_runtime.engines.source import Source
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.vllm import served

VARIABLE = "KVQ_CACHE"
TYPICAL = MODELS["qwen2.5-7b"]  # asked before the model is known; it is asked again for the model itself


def asked() -> str | None:
    """Return the value of the variable; None if it is not set or empty, and vLLM is unchanged."""
    return os.environ.get(VARIABLE) or None


@lru_cache(maxsize=4)
def load(reference: str) -> Source:
    """Load it, once a process. Raises what `load_artifact` does, and ValueError, with the variable's name."""
    try:
        found = source.read(reference)
        served.check(found.recipe, TYPICAL if found.artifact is None else found.artifact.fingerprint.geometry)
    except (ValueError, OSError, RuntimeError) as error:
        error.args = (f"{VARIABLE}={reference}: {error}",)
        raise
    return found


def check_model(found: Source, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """The shape of the served model. Raises ValueError or ArtifactError unless the recipe and the artifact are for it.

    config     of the model's decoder, as in config.json
    model      its folder or its id on a Hub, whose files vLLM has fetched: their projections are compared, where found
    """
    try:
        geometry = source.match(found, config, model, revision)
        served.check(found.recipe, geometry)
    except ArtifactError as error:
        raise ArtifactError(f"{VARIABLE}={found.reference}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={found.reference}: {error}") from None
    return geometry
