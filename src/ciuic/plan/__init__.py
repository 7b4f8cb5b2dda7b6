"""Choosing before training: which codec and interval pay on which link. Pure; no torch."""
