"""The decisions: synchronous, clockless, deterministic. Events in, decisions out."""
