"""Webhooks: a POST of JSON with a few retries. A failure is returned, not raised."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from bedplate._version import __version__
from bedplate.errors import UsageError

LIMIT_S = 10.0
PAUSES_S = (1.0, 4.0)
"""Pauses before the second and the third attempt."""


def check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("--webhook is not an HTTP URL", hint="for example https://example.com/hooks/bedplate")
    return url


def post(url: str, body: str) -> str | None:
    """Send `body`. Returns why it failed, or None if it was delivered."""
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url,
        data=body.encode(),
        headers={"Content-Type": "application/json", "User-Agent": f"bedplate/{__version__}"},
        method="POST",
    )
    why = "no attempt was made"
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
                answer.read(1)
            return None
        except urllib.error.HTTPError as error:
            error.close()
            why = f"HTTP {error.code}"
            if error.code < 500 and error.code not in (408, 429):
                return why  # a retry would get the same response
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or error) or type(error).__name__
    return why
