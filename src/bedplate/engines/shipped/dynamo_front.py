#!/usr/bin/env python3
"""Dynamo's front end, with its own options, and with a relay for what its workers publish about their caches.

Without a relay every worker publishes on a port of all of the machine's addresses, and has no setting for that; with
one it connects to a socket in a folder of the service's own. It lives in this process, since without the front
end nobody listens. Runs inside of Dynamo's environment, so it depends on nothing but what Dynamo needs.
"""

from __future__ import annotations

import os
import runpy
import threading
from typing import Any

import zmq

RELAY = "DYN_ZMQ_BROKER_URL"


def places(text: str) -> tuple[str, str]:
    """Where publishers and where subscribers connect, of `xsub=ADDRESS , xpub=ADDRESS`."""
    said = dict(part.strip().split("=", 1) for part in text.split(","))
    return said["xsub"], said["xpub"]


def begin_relay(publishers: str, subscribers: str) -> Any:
    """For as long as this process lives. Returns what must be kept until then."""
    context = zmq.Context()
    sockets = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for one, place in zip(sockets, (publishers, subscribers), strict=True):
        one.set_hwm(0)  # events are few, and one that is lost is a router that is wrong about a cache
        one.linger = 0
        one.bind(place)
    threading.Thread(target=zmq.proxy, args=sockets, daemon=True).start()
    return context, sockets


if __name__ == "__main__":
    kept = begin_relay(*places(os.environ[RELAY])) if os.environ.get(RELAY) else None
    runpy.run_module("dynamo.frontend", run_name="__main__", alter_sys=True)
