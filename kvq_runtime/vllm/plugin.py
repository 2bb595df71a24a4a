"""Register kvq's attention with vLLM: the entry point that vLLM calls in each of its processes.

Nothing happens unless KVQ_CACHE is set. Then what it names is loaded at once, so that a wrong name stops the command
before a model is read; the check against the model follows in the workers.
"""

import multiprocessing

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvq_runtime.vllm import served

BACKEND = "kvq_runtime.vllm.backend.KVQBackend"


def register() -> None:
    """Make kvq's attention the backend CUSTOM and, on a CPU, where vLLM takes no choice of backend, its only one."""
    reference = served.asked()
    if reference is None:
        return
    if multiprocessing.parent_process() is None:
        served.load(reference)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
