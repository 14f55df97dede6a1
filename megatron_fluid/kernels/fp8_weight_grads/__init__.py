"""Weight gradients of fp8 experts with block scales."""
