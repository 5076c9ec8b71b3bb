"""Guard a run: one run per directory, requests to stop, and a watchdog for hanging ranks."""
