"""Bundles: an engine, a model and bedplate itself in one folder, for machines without a network."""
