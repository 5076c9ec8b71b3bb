"""Read a checkpoint: print the contents and spectra, and export plain files."""
