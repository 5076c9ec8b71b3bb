"""The lab of the programs: predictions on machines, and studies of many runs."""
