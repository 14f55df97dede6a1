"""Casts between bf16 and block-scaled fp8, and their reference."""
