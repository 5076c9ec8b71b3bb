"""Networks and data sets to train on."""
