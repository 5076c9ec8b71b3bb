"""The configuration of training with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpikfac.plan import Synchronization, check_count, check_divides, make_plain


@dataclass(frozen=True, kw_only=True, repr=False)
class ParameterServer(Synchronization):
    """Train with clients that send updates to servers, which store the weights [Dean et al. 2012].

    The trainer is `AsyncSGD`.

    Attributes:
        servers: the number of ranks that do not train; each owns a shard of the weights, and
            applies updates to it in order of arrival.
        push_interval: the number of batches per update. Between two updates, a client takes plain
            SGD steps on a replica of the weights, and accumulates the gradients.
        fetch_interval: the number of batches from one fetch of weights to the next; None to fetch
            weights with each update.
        warmup_updates: the number of updates at the start that come from a single client.
        ranks_per_client: the number of ranks per client, which average gradients.
    """

    name: ClassVar[str] = "parameter-server"
    waits_for_all: ClassVar[bool] = False

    servers: int = 1
    push_interval: int = 1
    fetch_interval: int | None = None
    warmup_updates: int = 0
    ranks_per_client: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("servers", self.servers, 1)
        check_count("push_interval", self.push_interval, 1)
        check_count("fetch_interval", self.fetches, 1)
        check_count("warmup_updates", self.warmup_updates, 0)
        check_count("ranks_per_client", self.ranks_per_client, 1)

    @property
    def fetches(self) -> int:
        """The number of batches from one fetch of weights to the next."""
        return self.push_interval if self.fetch_interval is None else self.fetch_interval

    @property
    def server_ranks(self) -> int:
        """The number of ranks that store weights and do not train."""
        return self.servers

    def check_ranks(self, ranks: int) -> None:
        """Check that the ranks can be divided into clients.

        Raises:
            ValueError: the ranks cannot be divided into clients.
        """
        check_divides("sync.ranks_per_client", self.ranks_per_client, ranks)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        batches = "a batch" if self.push_interval == 1 else f"{self.push_interval} batches"
        size = self.ranks_per_client
        clients = f", clients of {size} ranks" if size > 1 else ""
        return {
            "synchronisation": f"asynchronous, updates of {batches}",
            "architecture": f"servers: {self.servers}{clients}",
        }
