"""Pages between arenas: manifests, plans, leases and the channel that checks all three."""
