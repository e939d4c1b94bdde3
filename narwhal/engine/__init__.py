"""The driver that talks to inference engines."""
