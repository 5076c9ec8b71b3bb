"""Check a user's model: the layers that K-FAC covers, and their results against autograd."""
