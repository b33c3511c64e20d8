"""The live page of a running endpoint, and the figures that it shows."""
