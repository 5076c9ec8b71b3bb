"""Check a user's model: which layers K-FAC covers, and whether their results match autograd."""
