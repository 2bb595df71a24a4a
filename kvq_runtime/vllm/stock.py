"""vLLM's own attention of this platform, which serves the layers that kvq leaves alone."""

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_KIND = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.TRITON_ATTN

STOCK: type[AttentionBackend] = resolve_obj_by_qualname(_KIND.value)  # vLLM's own, whatever is registered
