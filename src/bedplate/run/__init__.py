"""Puts a plan into service: engine environments, the supervisor and the gateway."""
