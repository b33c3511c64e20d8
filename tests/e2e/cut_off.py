"""Runs a server with only a loopback network device, sends it a request, and prints the result.

    unshare -rn python cut_off.py COMMAND…

Prints one line of JSON: the endpoint, the answer, and whether anything outside was reachable.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from typing import Any

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
OUTSIDE = ("192.0.2.1", 443)
"""Of a network that is kept for documentation; with any route at all, this would wait and not fail at once."""


def raise_loopback() -> None:
    with socket.socket() as one, contextlib.suppress(PermissionError):
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))


def is_cut_off() -> bool:
    try:
        socket.create_connection(OUTSIDE, timeout=0.5).close()
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def ask(url: str) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> int:
    raise_loopback()
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        return process.wait()
    endpoint = json.loads(line)
    said = ask(endpoint["url"])
    print(json.dumps({"endpoint": endpoint, "answer": said, "cut_off": is_cut_off()}), flush=True)
    process.send_signal(signal.SIGINT)
    return process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
