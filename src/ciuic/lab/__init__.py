"""Emulated links, the demo and its report."""
