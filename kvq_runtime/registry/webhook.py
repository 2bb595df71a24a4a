"""Tell an address of every event of a registry, and every remark made by hand.

The address is $KVQ_WEBHOOK; what it is told is signed with $KVQ_WEBHOOK_SECRET.

    POST {"registry": "hf://my-org", "event": {"kind": "promote", "name": "...", ...}}
    X-KVQ-Signature-256: sha256=<HMAC-SHA256 of the body, in hexadecimal>
    X-KVQ-Delivery: <sha256 of the body: the same if it is told twice>

It is told after the change, which stands whatever comes of it: an address that does not answer is a warning.
"""

import hashlib
import hmac
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from kvq_runtime.disk import strict_json

ADDRESS, SECRET = "KVQ_WEBHOOK", "KVQ_WEBHOOK_SECRET"
TRIES, SECONDS = 2, 5.0  # how often an address is asked, and how long each step of its answer may take
_log = logging.getLogger(__name__)


def tell(registry: str, event: Mapping[str, Any]) -> None:
    """Tell the address, if one is set, of an event or a remark of this registry, as JSON; never raises."""
    address, secret = os.environ.get(ADDRESS), os.environ.get(SECRET, "")
    if not address:
        return
    if not _is_address(address):
        return _log.warning("%s is no http:// or https:// address without a user; nothing is told", ADDRESS)
    if not secret:
        return _log.warning("%s is set without %s, by which it is signed; nothing is told", ADDRESS, SECRET)
    body = strict_json.record({"registry": registry, "event": event})
    head = {
        "Content-Type": "application/json",
        "X-KVQ-Signature-256": f"sha256={signature(body, secret)}",
        "X-KVQ-Delivery": hashlib.sha256(body).hexdigest(),
    }
    said = ""
    for _ in range(TRIES):
        try:
            asked = urllib.request.Request(address, body, head, method="POST")
            with _opener.open(asked, timeout=SECONDS):
                return None
        except urllib.error.HTTPError as error:
            said = f"it answered {error.code}"
            error.close()
        except (OSError, ValueError, HTTPException) as error:
            said = cause(error)
    _log.warning("%s (%s) was not told of the change, which stands: %s", ADDRESS, urlsplit(address).hostname, said)
    return None


def cause(error: Exception) -> str:
    """The reason why a request failed, in words that do not quote its address, as the error's own may."""
    reason = getattr(error, "reason", error)
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
        )
    except ValueError:
        return False


def signature(body: bytes, secret: str) -> str:
    """Return HMAC-SHA256 of a body in hexadecimal; compare it by `hmac.compare_digest`."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


class Stay(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: what was signed for one address is not sent to another."""

    def redirect_request(self, *given: object) -> None:
        return None


_opener = urllib.request.build_opener(Stay)
