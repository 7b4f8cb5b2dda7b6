"""Who may come in and what was done: certificates, tokens, limits, the audit log."""
