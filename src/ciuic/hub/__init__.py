"""The hub: membership and runs (pure state), their store, the ledger's keeper and one TLS port for everybody."""
