"""Speculative decoding of M3."""
