"""Which form of a layer is the fastest here: figures of the machine, measured once, and what they
predict."""
