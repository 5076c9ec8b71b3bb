"""Clients and servers: clients push updates, and nobody waits for a second client."""

from __future__ import annotations

from mpikfac.extensions.clients.asynchronous import Asynchronous as Asynchronous
from mpikfac.extensions.clients.server import serve_updates as serve_updates
