"""Measure endpoints: throughput, latency, and whether the answers are correct."""
