"""Serve a compressed cache as a transformers Cache. The only package that imports transformers.

transformers hands a cache keys (after RoPE), values and the layer's number, nothing else. What a recipe needs beside
them, padding, positions, the cos and sin in use, comes through a forward hook that `KVQCache(model=...)` puts on the
model once. It acts only when the cache is a KVQCache. No model file is touched.

Under `model.set_attn_implementation("kvq")` a step attends to the packed codes directly where possible, and queries and
weights are there for recipes that need them. Under any other attention the cache hands out decoded tensors.
"""

from kvq_runtime.hf import attention as attention  # registers "kvq"
from kvq_runtime.hf.cache import KVQCache as KVQCache
from kvq_runtime.hf.model import fingerprint_of as fingerprint_of
from kvq_runtime.hf.model import geometry_of as geometry_of
