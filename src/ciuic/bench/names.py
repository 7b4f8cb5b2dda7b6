"""The benchmarks there are. The command line reads this; it must not import torch."""

NAMES: dict[str, str] = {
    "codec": "codecs beside copying the same memory",
    "sync": "training over emulated links, beside plain DDP",
    "resilience": "what failures cost the others: a node killed, silent, rejoining; a hub away",
    "links": "how much of a long link a push uses, beside one plain TCP stream",
    "learning": "held-out loss of modes, codecs and intervals",
    "ddp": "the DDP hook beside plain DDP and torch's own hooks",
    "doctor": "what the doctor finds on the fault zoo, false alarms, and what looking costs",
    "hub": "bytes per core-second through the hub, beside a bare TLS socket",
}
