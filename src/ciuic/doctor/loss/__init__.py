"""Loss consistency: one batch on all ranks, and where they part. No torch."""
