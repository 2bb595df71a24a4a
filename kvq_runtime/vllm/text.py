"""What of a request of vLLM decides its keys and values."""

from typing import Any

from kvq_runtime.engines.orders import Text


def text_of(request: Any) -> Text:
    """The request as it is planned for."""
    plain = (
        request.prompt_token_ids is not None
        and not request.mm_features
        and request.prompt_embeds is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and request.lora_request is None
    )
    reads = not getattr(request, "skip_reading_prefix_cache", False)
    salt, resets = request.cache_salt or "", request.num_preemptions
    return Text(request.request_id, request.all_token_ids, salt, plain, reads, resets)
