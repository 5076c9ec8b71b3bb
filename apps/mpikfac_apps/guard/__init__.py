"""Guard a run: a lock on the directory, requests to stop, and a watchdog for hanging ranks."""
