"""`shardwright ui`: the planner page."""

from __future__ import annotations

import importlib.util

from pydantic import Field

from ...ds_configs.specs.errors import ShardwrightError
from ..options import ConfigFile
from ..settings import FILLED, Options


class Flags(ConfigFile):
    group = "Run"

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for other machines too")
    port: int = Field(7860, ge=0, le=65535, description="Port to listen on; 0 for any free port")


def ui_command(*, options: Options[Flags] = FILLED) -> int:
    """Plan and check in the browser: figures, alternatives, files to download, and an address for each plan.

    Only requests to the Hub for the models that you name leave this machine. Stop it with Ctrl-C.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ShardwrightError("the page needs gradio, which is not installed; pip install 'shardwright[ui]'")
    from ..page.app import serve

    serve(options.host, options.port, announce=lambda address: print(f"Shardwright planner: {address}", flush=True))
    return 0
