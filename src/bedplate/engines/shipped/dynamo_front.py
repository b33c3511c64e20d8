#!/usr/bin/env python3
"""Dynamo's front end with its own options, and with a relay for the KV events of its workers.

Without a relay every worker publishes on a port of all addresses of the machine, which cannot be configured; with a
relay it connects to a socket in the folder of the service. The relay runs in this process because only the front end
subscribes. Runs in Dynamo's environment and depends only on Dynamo's dependencies.
"""

from __future__ import annotations

import os
import runpy
import threading
from typing import Any

import zmq

RELAY = "DYN_ZMQ_BROKER_URL"


def parse_addresses(text: str) -> tuple[str, str]:
    """The addresses for publishers and subscribers in `xsub=ADDRESS , xpub=ADDRESS`."""
    addresses = dict(part.strip().split("=", 1) for part in text.split(","))
    return addresses["xsub"], addresses["xpub"]


def start_relay(publishers: str, subscribers: str) -> Any:
    """Start the relay. The caller must keep the returned objects until the process exits."""
    context = zmq.Context()
    sockets = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for one, address in zip(sockets, (publishers, subscribers), strict=True):
        one.set_hwm(0)  # a lost event would give the router a wrong view of a KV cache
        one.linger = 0
        one.bind(address)
    threading.Thread(target=zmq.proxy, args=sockets, daemon=True).start()
    return context, sockets


if __name__ == "__main__":
    kept = start_relay(*parse_addresses(os.environ[RELAY])) if os.environ.get(RELAY) else None
    runpy.run_module("dynamo.frontend", run_name="__main__", alter_sys=True)
