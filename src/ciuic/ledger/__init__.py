"""The ledger: a snapshot of the parameters plus an append-only sequence of small compressed updates.

Layout and formats (layout, frame, entry), the two machines (replica on the node, aggregate and inbox on the hub), the
samples, and the durable files with their replay. No torch, no sockets, no clock.
"""
