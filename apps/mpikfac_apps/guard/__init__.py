"""Guard a run: a lock on its directory, requests to stop, and a watchdog for hanging ranks."""
