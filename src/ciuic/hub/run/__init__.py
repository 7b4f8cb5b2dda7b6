"""One run's ledger on the hub: attachments, leases, pushes, rounds, settings, and what is told of them."""
