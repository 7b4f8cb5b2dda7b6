"""Fragments that other processes serve: where they are, moves, and the shard process itself."""
