"""Grouped GEMMs of 16-bit experts: forward, dgrad and weight gradients."""
