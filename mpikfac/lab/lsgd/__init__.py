"""LSGD: replicas follow the replica with the least loss [Teng et al. 2019]."""
