"""Measurement: load generation, comparison with plain decoding, reports."""
