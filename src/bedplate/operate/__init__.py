"""What needs all of the other rooms on a live endpoint: services, and what changes them while they run."""
