"""From an order to a running service: the host with its operations and its live page."""
