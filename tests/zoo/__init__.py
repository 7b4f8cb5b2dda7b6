"""The fault zoo: small training programs x faults that people really made, each with its clean twin."""
