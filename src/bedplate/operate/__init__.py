"""Bundles: everything that it takes to serve one model at an air-gapped site."""
