"""Where the lease and the handoff live: Redis and the local file."""
