"""Finds the best settings of one engine by measurement: the search, its time budget, and the proof."""
