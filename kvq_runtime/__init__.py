"""Serve calibrated, packed key/value caches. Imports torch, safetensors and huggingface-hub, nothing more."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq_runtime.hf import KVQCache as KVQCache


def __getattr__(name: str):
    """`KVQCache` on first use: it is the one name that needs transformers."""
    if name != "KVQCache":
        raise AttributeError(f"module kvq_runtime has no attribute {name!r}")
    try:
        from kvq_runtime.hf import KVQCache
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        text = "KVQCache needs transformers: pip install 'kvq-runtime[hf]'"
        raise ModuleNotFoundError(text, name="transformers") from None
    return KVQCache
