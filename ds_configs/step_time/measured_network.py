"""Network between nodes as a comparison of machines measured it, in the place of a common server's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..specs.errors import Fault, RefusedInputError
from ..specs.hardware import HardwareSpec
from ..specs.json_text import strict_json
from .constants import constants_of

FILE_NAME = "network.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredNetwork:
    """Rate of a short all-reduce between machines."""

    gpu: str
    """Catalog name of their accelerators."""
    gpus_per_node: int
    """How many each has."""
    nodes: int
    """Machines."""
    bytes_per_s: float
    """What moved out of one accelerator of each machine, in one direction."""

    @property
    def nominal_bytes_per_s(self) -> float:
        """Rate of the link of which a collective gets this much: plans count on a share of what they are told."""
        return self.bytes_per_s / constants_of(self.gpu).network_efficiency


def network_text(network: MeasuredNetwork) -> str:
    """Return what `network.json` holds."""
    return json.dumps({"schema_version": SCHEMA_VERSION} | asdict(network), indent=1) + "\n"


def network_from_text(text: str | bytes, *, source: str) -> MeasuredNetwork:
    """Return what a `network.json` says.

    Raises:
        RefusedInputError: it is none, or of another version.
    """
    kinds = {"gpu": str, "gpus_per_node": int, "nodes": int, "bytes_per_s": float}
    try:
        values = strict_json(text)
    except ValueError as error:
        raise RefusedInputError(Fault(where=source, rule=f"is no JSON object ({error})")) from None
    sound = isinstance(values, dict) and values.pop("schema_version", None) == SCHEMA_VERSION
    sound = sound and values.keys() == kinds.keys() and all(type(values[name]) is kind for name, kind in kinds.items())
    if not sound or min(values["gpus_per_node"], values["bytes_per_s"], values["nodes"] - 1) <= 0:
        rule, fix = f"is no network.json of version {SCHEMA_VERSION}", "let `launch` compare the machines again"
        raise RefusedInputError(Fault(where=source, rule=rule, fix=fix))
    return MeasuredNetwork(**values)


def with_measured_network(
    hardware: HardwareSpec, measured: Sequence[MeasuredNetwork]
) -> tuple[HardwareSpec, str | None]:
    """Return hardware whose assumed network is the last measured one of such nodes, and a remark where it is.

    What a user states stays.
    """
    if "network_bytes_per_s" not in hardware.assumed:
        return hardware, None
    like = (hardware.gpu, hardware.gpus_per_node)
    found = next((one for one in reversed(measured) if (one.gpu, one.gpus_per_node) == like), None)
    if found is None:
        return hardware, None
    remark = (
        f"the network is planned as measured on {found.nodes} such nodes: {found.bytes_per_s / 1e9:.2f} GB/s from each "
        f"accelerator, where {hardware.network_bytes_per_s * constants_of(hardware.gpu).network_efficiency / 1e9:.2f} "
        "would be assumed"
    )
    assumed = tuple(name for name in hardware.assumed if name != "network_bytes_per_s")
    return replace(hardware, network_bytes_per_s=found.nominal_bytes_per_s, assumed=assumed), remark
