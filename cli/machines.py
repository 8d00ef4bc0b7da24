"""Options of a command that runs on one of several machines."""

from __future__ import annotations

from pydantic import Field

from ..ds_configs.plan.rendering import MAIN_PORT, NodePlace
from ..ds_configs.specs.errors import ConfigError, UsageError
from ..ds_configs.specs.settings import Settings


class MachineOptions(Settings):
    """This machine's place among those that run a command together; the hardware or the plan sets their number."""

    group = "Machines"

    node_rank: int | None = Field(None, ge=0, description="Rank of this machine, if you start each one yourself")
    main_address: str | None = Field(None, description="Host name or address of machine 0")
    main_port: int = Field(
        MAIN_PORT,
        ge=1,
        le=65534,
        description="TCP port of machine 0; training also uses the next port",
    )
    until_stdin_closes: bool = Field(False, description="Stop when standard input ends; a training run saves first")
    check_nodes: bool = Field(True, description="Compare versions, accelerators and files of all machines first")

    def errors(self) -> list[ConfigError]:
        """Return an error for each option that needs another one."""
        if self.node_rank is not None and self.main_address is None:
            return [ConfigError(where="node_rank", value=self.node_rank, rule="needs --main-address")]
        if self.main_address is not None and self.node_rank is None:
            return [ConfigError(where="main_address", value=self.main_address, rule="needs --node-rank")]
        if self.node_rank is None and self.main_port != MAIN_PORT:
            rule, fix = "is for one of several machines", "pass --node-rank and --main-address too"
            return [ConfigError(where="main_port", value=self.main_port, rule=rule, fix=fix)]
        return []

    def place(self) -> NodePlace | None:
        """Return this machine's rank and address, or `None` for a single machine; start `until_stdin_closes`.

        Raises:
            UsageError: options that cannot be combined.
        """
        if errors := self.errors():
            raise UsageError(errors)
        if self.until_stdin_closes:
            from ..plugins.launching.lifetime import stop_with_stdin

            stop_with_stdin()
        if self.node_rank is None or self.main_address is None:
            return None
        return NodePlace(rank=self.node_rank, main_address=self.main_address, main_port=self.main_port)
