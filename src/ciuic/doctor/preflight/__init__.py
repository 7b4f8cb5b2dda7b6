"""Looking before a run: this machine, the way to the other nodes, and whether all of them are alike.

No torch here. What needs it runs as a process of its own, `python -m ciuic.doctor.preflight_probe`, so that whatever
happens there (a crash in a native library, for one) is a line of the report.
"""
