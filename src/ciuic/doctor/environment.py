"""Names of the environment through which `ciuic doctor run` and the probes in the ranks know each other."""

ADDRESS = "CIUIC_DOCTOR"
"""host:port of the collector."""
TOKEN = "CIUIC_DOCTOR_TOKEN"
EVERY = "CIUIC_DOCTOR_EVERY"
"""Steps from one sample to the next."""
FOLDER = "CIUIC_DOCTOR_FOLDER"
"""Where ranks on this machine may write what is too large for a record; empty: nowhere."""
RECORDER = "TORCH_FR_BUFFER_SIZE"
"""Read by torch when it is imported: entries of its Flight Recorder."""
RECORDER_ENTRIES = "2000"
EVERY_DEFAULT, EVERY_STRICT = 10, 1
