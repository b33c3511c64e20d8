"""A discrete-event simulation of a fleet: engines with continuous batching, routers and layouts. Pure functions."""

from __future__ import annotations

from bedplate.decide.simulate.book import Book
from bedplate.decide.simulate.deployment import Deployment, deployed
from bedplate.decide.simulate.fleet import Fleet, Ran, Transfer, simulate
from bedplate.decide.simulate.outcome import MET, Paid, outcome
from bedplate.decide.simulate.replica import Limits, Replica, Steps
from bedplate.decide.simulate.search import Question, cheapest, one_layout
from bedplate.decide.simulate.times import Lengths, timed
from bedplate.decide.simulate.traffic import Stream, from_shapes, synthetic

__all__ = [
    "MET", "Book", "Deployment", "Fleet", "Lengths", "Limits", "Paid", "Question", "Ran", "Replica", "Steps",
    "Stream", "Transfer", "cheapest", "deployed", "from_shapes", "one_layout", "outcome", "simulate", "synthetic",
    "timed",
]  # fmt: skip
