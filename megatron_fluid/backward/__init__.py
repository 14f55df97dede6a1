"""Deferred weight gradients."""
