"""A whole pair on one machine, and the drills that break it."""
