"""Moving bytes: peer rounds, symmetric buffers, transports."""
