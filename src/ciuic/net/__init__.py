"""What hub, node and worker share on the wire: messages, certificates, join tokens, the client, the probe."""
