"""The command line: one small module per command group.

These modules import at the top only what is cheap (typer and the ground floor) and import the rest inside the command
that needs it: `ciuic --help` and shell completion must answer at once, and pydantic, cryptography, a TLS client and a
web server together take several times as long as the answer. It is never done to hide an import cycle.
"""
