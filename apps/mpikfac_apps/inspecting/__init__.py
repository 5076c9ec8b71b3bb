"""Programs that read a checkpoint: its contents, its spectra, and an export as plain files."""
