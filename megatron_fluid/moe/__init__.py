"""Mixture of experts: routing plan, dispatch, experts, combine, forward and backward, and the
standalone layer."""
