"""Where each token goes: routing and the plan of a dispatch."""
