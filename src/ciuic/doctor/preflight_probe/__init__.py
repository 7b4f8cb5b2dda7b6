"""The part of the preflight that needs torch: `python -m ciuic.doctor.preflight_probe`, a process of its own."""
