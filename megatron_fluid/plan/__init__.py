"""Figures of machines, by which `auto` chooses."""
