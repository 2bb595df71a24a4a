"""Serve models with compressed, packed key/value caches.

    from kvq_runtime import KVQCache

    cache = KVQCache.from_pretrained("qwen2.5-7b-aqua-2bit", model=model)
    output = model.generate(**inputs, cache=cache)
    print(cache.memory_report())

    artifact = load_artifact("my-org/qwen2.5-7b-aqua-2bit@1.2.0")    # without transformers
    preset("higgs-2bit")                                                          # a recipe that needs no artifact

Importing KVQCache registers the attention "kvq" with transformers; `import kvq_runtime` alone imports neither torch nor
transformers. The names of `__all__` are the public interface; modules may move between versions. A name is imported on
first use: KVQCache, PrefixStore and CudaGraphs need transformers (extra `hf`), the others torch,
safetensors and huggingface-hub.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_runtime.artifact.artifact import Artifact
    from kvq_runtime.artifact.folder import save_pretrained
    from kvq_runtime.errors import ArtifactError, Conflict, NotFound
    from kvq_runtime.hf import KVQCache
    from kvq_runtime.hf.cuda_graphs import CudaGraphs
    from kvq_runtime.prefix.transformers import PrefixStore
    from kvq_runtime.recipe import Recipe, preset, presets
    from kvq_runtime.registry.copy import push_to_hub
    from kvq_runtime.registry.resolve import load_artifact
    from kvq_runtime.store.memory import MemoryReport

    __version__: str

__all__ = [
    "Artifact",
    "ArtifactError",
    "Conflict",
    "CudaGraphs",
    "KVQCache",
    "MemoryReport",
    "NotFound",
    "PrefixStore",
    "Recipe",
    "__version__",
    "load_artifact",
    "preset",
    "presets",
    "push_to_hub",
    "save_pretrained",
]

_MODULES = {
    "Artifact": "artifact.artifact",
    "ArtifactError": "errors",
    "Conflict": "errors",
    "CudaGraphs": "hf.cuda_graphs",
    "KVQCache": "hf",
    "MemoryReport": "store.memory",
    "NotFound": "errors",
    "PrefixStore": "prefix.transformers",
    "Recipe": "recipe",
    "load_artifact": "registry.resolve",
    "preset": "recipe",
    "presets": "recipe",
    "push_to_hub": "registry.copy",
    "save_pretrained": "artifact.folder",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        try:
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        except ImportError as error:
            if not (error.name or "").startswith("transformers"):
                raise
            raise type(error)(f"{name} needs transformers{_transformers()}", name="transformers") from error
    else:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _transformers() -> str:
    """Return the versions of transformers that kvq takes, and the one that is installed, if any."""
    from importlib import metadata  # takes longer than all else that an import of this package does

    from kvq_runtime.errors import extra

    try:
        found, asked = metadata.version("transformers"), metadata.requires("kvq-runtime") or []
    except metadata.PackageNotFoundError:
        return f"; {extra('hf')}"
    wanted = next((one.partition(";")[0].strip() for one in asked if one.startswith("transformers")), "another")
    return f" {wanted.removeprefix('transformers')}, and {found} is here; {extra('hf')}"


def _version() -> str:
    """The version of the installed distribution; "unknown" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("kvq-runtime")
    except metadata.PackageNotFoundError:
        return "unknown"
