"""Endpoints by who calls them, bodies in chunks, and what watchers are told."""
