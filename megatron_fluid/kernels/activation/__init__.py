"""Activations of expert MLPs with their probabilities and biases: Triton kernels."""
