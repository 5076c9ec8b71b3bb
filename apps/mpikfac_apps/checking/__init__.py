"""Check a user's model: the layers covered by K-FAC, and the layers' numbers against autograd."""
