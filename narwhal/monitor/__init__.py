"""The monitor loop: eight independent stages a pass."""
