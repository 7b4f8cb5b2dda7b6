"""The training process: models, data, the training loop and (in `session`) what ties a loop to the ledger.

Torch lives here. Importing this package alone imports nothing heavy; its modules do.
"""
