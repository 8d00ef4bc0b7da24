"""`shardwright ui`: the planner as a page in the browser."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options import ConfigOption
from ..settings import FILLED, Options, grouped


@grouped
class PageOptions(ConfigOption):
    """Place of the page."""

    group = "Run"

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets other machines in")
    port: int = Field(7860, ge=0, le=65535, description="Port to listen on; 0 takes a free one")


def ui_command(*, options: Annotated[PageOptions, Options] = FILLED) -> int:
    """Plan and check in the browser: charts, alternatives, files to download, and a link to each plan.

    Nothing leaves this machine but questions to the Hub about models that somebody names. Ends with Ctrl-C.
    """
    from ..page.server import serve

    serve(options.host, options.port, announce=lambda address: print(f"Shardwright planner: {address}", flush=True))
    return 0
