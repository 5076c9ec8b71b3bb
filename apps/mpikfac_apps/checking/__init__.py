"""The check of a user's model: the layers that K-FAC covers, and their numbers against autograd."""
