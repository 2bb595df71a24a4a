"""The connector, with a block that is damaged between the scheduler's check and the worker's load, once."""

from typing import Any

from kvq_runtime.prefix import chain
from kvq_runtime.vllm.connector import KVQConnector


class LateDamage(KVQConnector):
    """Damages the third block of the first load."""

    done = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._orders.loads and not LateDamage.done:
            order, store = self._orders.loads[0], self._stores[0]
            third = chain.names(store.under(order.salt).root, chain.token_row(order.tokens), store.block)[2]
            store.shelf.path(third).write_bytes(b"no block at all")
            LateDamage.done = True
        super().start_load_kv(forward_context, **kwargs)
