"""Profiler traces: how much communication was hidden, as text, page and picture."""
