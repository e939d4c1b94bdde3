"""Doubles that are product code: typed, linted, shipped, used by the demo and the tests."""
