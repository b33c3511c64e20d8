"""A discrete-event simulation of a fleet: engines with continuous batching, routers and layouts. Pure functions."""

from __future__ import annotations

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.deployment import Deployment, list_deployments, make_deployment
from bedplate.decide.simulate.fleet import Fleet, FleetRun, Transfer, simulate
from bedplate.decide.simulate.outcome import MET, CardPrice, compute_outcome
from bedplate.decide.simulate.replica import ReplicaLimits, SimulatedReplica, Steps
from bedplate.decide.simulate.search import FleetSearch, find_cheapest, simulate_one_layout
from bedplate.decide.simulate.sessions import make_session_stream
from bedplate.decide.simulate.times import MeanLengths, make_replica_times
from bedplate.decide.simulate.traffic import RequestStream, from_shapes, make_synthetic

__all__ = [
    "MET",
    "Book",
    "CardPrice",
    "Deployment",
    "Fleet",
    "FleetRun",
    "FleetSearch",
    "MeanLengths",
    "ReplicaLimits",
    "RequestStream",
    "SimulatedReplica",
    "Steps",
    "Transfer",
    "compute_outcome",
    "find_cheapest",
    "from_shapes",
    "list_deployments",
    "make_deployment",
    "make_replica_times",
    "make_session_stream",
    "make_synthetic",
    "simulate",
    "simulate_one_layout",
]  # fmt: skip
