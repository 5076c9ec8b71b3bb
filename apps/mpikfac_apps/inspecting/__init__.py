"""Read a checkpoint: print its contents and spectra, and export plain files."""
