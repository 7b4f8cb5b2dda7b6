"""What lasts: the database, retention, backups, ledgers rebuilt from copies."""
