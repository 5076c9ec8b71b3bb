"""LSGD: replicas follow the replica with the lowest loss [Teng et al. 2019]."""
