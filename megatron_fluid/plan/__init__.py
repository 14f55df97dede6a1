"""Cost model: reference figures of machines, and the time that they predict for each form of a
layer."""
