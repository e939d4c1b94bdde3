"""Narwhal: the highly available router in front of a prefill/decode inference fleet."""

__version__ = "0.1.0"
