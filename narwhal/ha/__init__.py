"""The pair: holding the lease, following the active, taking over."""
