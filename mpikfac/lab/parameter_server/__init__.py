"""Parameter servers, and clients that train with them without waiting for each other."""
