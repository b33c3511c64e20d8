"""Finds the best settings of one engine by measuring: the search, its time budget, and the proof."""
