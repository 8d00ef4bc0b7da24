"""Plans every class of the installed Transformers, two layers deep: `python tools/every_model.py`.

Prints how many are planned from coefficients, planned by an upper bound, beyond the hardware, or refused with a reason;
anything else, or more than ten seconds of the processor, is broken and ends the command with code 1. Needs no network
and no weights.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shardwright.ds_configs.models.model_config import SIZED_FAMILIES
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.planning import plan
from shardwright.tools.activations.depth import at_depth, stack_depths

LIMIT_SECONDS = 10
KINDS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")
HARDWARE = "8xH100-80GB"


def classes() -> dict[str, str]:
    """Model type of every causal, encoder-decoder, masked, vision and image-text class, by its name."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind in KINDS:
        for model_type, named in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            for architecture in [named] if isinstance(named, str) else named:
                found.setdefault(architecture, model_type)
    return dict(sorted(found.items()))


def shallow_config(architecture: str, model_type: str) -> dict[str, Any]:
    """The default configuration with two layers in every stack, where the class has stacks."""
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    if model_type in SIZED_FAMILIES:
        # Families that are counted without transformers must state their sizes.
        from transformers import AutoConfig

        config = AutoConfig.for_model(model_type).to_dict() | config
    try:
        return at_depth(config, stack_depths(config, 2))
    except Exception:
        # Configuration classes without defaults, or without layers, are left to the planner, which reports them.
        return config


def outcome(
    architecture: str, model_type: str, directory: Path, *, limit_seconds: int = LIMIT_SECONDS
) -> tuple[str, str]:
    """What planning one class comes to, with the reason where it is no plan; no limit with 0 seconds."""
    path = directory / "config.json"
    path.write_text(json.dumps(shallow_config(architecture, model_type)), encoding="utf-8")
    # Seconds of this process: others on the machine do not break a plan.
    signal.setitimer(signal.ITIMER_PROF, limit_seconds)
    try:
        made = plan(str(path), HARDWARE, calibration=None)
    except PlanDoesNotFitError:
        return "does not fit", ""
    except ShardwrightError as error:
        return "refused", str(error).replace(str(path), "config.json")
    except Exception as error:
        return "broken", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ("planned" if made.activations == "stored" else "planned by an upper bound"), ""


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT_SECONDS} s")


def main(arguments: list[str]) -> int:
    """Count the outcomes."""
    parser = argparse.ArgumentParser(prog="every_model", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take only every n-th class")
    parser.add_argument("--verbose", action="store_true", help="name every class with its outcome and seconds")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPROF, _too_long)
    counts: Counter[str] = Counter()
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory() as directory:
        for architecture, model_type in list(classes().items())[:: options.every]:
            started = time.process_time()
            result, reason = outcome(architecture, model_type, Path(directory))
            seconds = time.process_time() - started
            counts[result] += 1
            slowest = max(slowest, (seconds, architecture))
            if options.verbose or result == "broken":
                print(f"{architecture}: {result} in {seconds:.1f} s {' '.join(reason.split())[:200]}", flush=True)
    print(f"{sum(counts.values())} classes: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    print(f"slowest: {slowest[1]}, {slowest[0]:.1f} s; broken: {counts['broken']}")
    return 1 if counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
