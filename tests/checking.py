"""Good configuration files and a look-up of findings, for the tests of the checker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.ds_configs.check.report import Finding

DATA = Path(__file__).parent / "data" / "check"
ZERO_2: dict[str, Any] = json.loads((DATA / "zero_2.json").read_text())
ZERO_3_CPU: dict[str, Any] = json.loads((DATA / "zero_3_cpu.json").read_text())
ZERO_3_NVME: dict[str, Any] = json.loads((DATA / "zero_3_nvme.json").read_text())
PLAIN: dict[str, Any] = json.loads((DATA / "plain.json").read_text())
FSDP2 = (DATA / "fsdp2.yaml").read_text()
DEEPSPEED_YAML = (DATA / "deepspeed.yaml").read_text()
ZERO = "zero_optimization"
E, W = "error", "warning"


def found(findings: tuple[Finding, ...], kind: str, path: str, fragment: str) -> bool:
    """Whether a finding of this kind stands at this key path and says this."""
    return any(
        finding.kind == kind
        and finding.error.where.partition(" ")[2] == path
        and fragment in f"{finding.error.rule}; {finding.error.fix}"
        for finding in findings
    )
