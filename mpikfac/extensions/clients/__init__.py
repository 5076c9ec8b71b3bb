"""Clients and servers: clients push updates, and nobody waits for a second client."""

from __future__ import annotations

from mpikfac.extensions.clients.asynchronous import AsyncSGD as AsyncSGD
from mpikfac.extensions.clients.server import run_parameter_server as run_parameter_server
