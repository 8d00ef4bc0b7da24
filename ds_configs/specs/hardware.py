"""`HardwareSpec`: nodes, accelerators, links and host memory, from a name such as `4x8xH100-80GB` or a mapping."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .errors import ConfigError, UsageError, collecting
from .units import exact_bytes, parse_bytes

_GIB = 2**30
_LARGEST_COUNT = 100_000
_NAME = re.compile(
    r"(?:(?:(?P<nodes>\d{1,30}) *[xX×] *)?(?P<gpus>\d{1,30}) *[xX×] *)?"
    r"(?P<gpu>(?:[A-Za-z]|\d{4}(?!\d))[A-Za-z0-9 ._-]*)",
    re.ASCII,
)
_EXPONENT = re.compile(r"\d{1,30}(?:\.\d{1,30})?[eE][+-]?\d{1,3}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """One homogeneous cluster."""

    name: str
    """Name as the user wrote it, such as `8xA100-80GB`."""
    nodes: int
    gpus_per_node: int
    gpu: str
    """Catalog name of the accelerator."""
    gpu_bytes: int
    """Memory of one accelerator as reported by the driver, which a process can allocate."""
    flops_per_s: float
    """Dense bf16 (else fp16) matrix FLOP/s of one accelerator."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth of one accelerator to its peers within the node, one direction."""
    network_bytes_per_s: float
    """Bandwidth per accelerator between nodes, one direction."""
    host_bytes_per_node: int
    nvme_bytes_per_node: int = 0
    """Local NVMe of one node; 0 without NVMe."""
    nvme_path: str | None = None
    """Directory on the NVMe, the same on every node."""
    supports_bf16: bool = True
    fp32_flops_per_s: float | None = None
    """Matrix FLOP/s in fp32; `None` for the generation's share of `flops_per_s`."""
    attention_flops_per_s: float | None = None
    """FLOP/s that fused attention reaches in both passes; `None` for the generation's share of `flops_per_s`."""
    fp32_attention_flops_per_s: float | None = None
    """The same in fp32."""
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Fields that the user did not set; their values are those of a common server."""

    def __hash__(self) -> int:
        """Return a cheap hash, because hardware is the key of caches."""
        return hash((self.gpu, self.nodes, self.gpus_per_node))

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def file(self) -> str:
        """The YAML file that describes this hardware; empty if a name does."""
        return next((text for text in (self.source, self.name) if text.endswith((".yaml", ".yml"))), "")

    def options(self) -> dict[str, str]:
        """Return the options of a command that result in this hardware."""
        counts = f"{self.nodes}x{self.gpus_per_node}x" if self.nodes > 1 else f"{self.gpus_per_node}x"
        options = {"hardware": counts + self.gpu}
        if self.name.endswith("(local)"):
            options = {"hardware": "local"} | ({"num_processes": str(self.world_size)} if self.gpu == "CPU" else {})
        elif self.file or self.gpu not in gpu_catalog():
            options = {"hardware": self.file or self.name}
        # Measured CPU ranks and their host share the memory of this machine.
        if "host_bytes_per_node" not in self.assumed and (self.gpu != "CPU" or options["hardware"] != "local"):
            options["host_memory"] = exact_bytes(self.host_bytes_per_node)
        if self.nvme_path is not None:
            options["nvme"] = f"{self.nvme_path}:{exact_bytes(self.nvme_bytes_per_node)}"
        return options


@lru_cache(maxsize=1)
def gpu_catalog() -> Mapping[str, Mapping[str, Any]]:
    """Return the catalog of accelerators by name."""
    text = files(__package__.rpartition(".")[0]).joinpath("data/gpus.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def find_gpu(name: str, *, where: str = "hardware") -> str:
    """Return the catalog entry that a name or one of its aliases means; case, punctuation and vendor are ignored.

    A name may add the device's memory (`H200-141GB`). Names are never completed: `A4` is not `A40`.
    Raises `UsageError` with candidates.
    """
    wanted, names = _key(name), _names()
    if wanted in names:
        return names[wanted]
    near = [names[key] for key in get_close_matches(wanted, list(names), n=12, cutoff=0.4)]
    devices = [gpu for gpu in gpu_catalog() if wanted and _key(gpu.partition("-")[0]) == wanted]
    if wanted in _ANY_ACCELERATOR:
        rule, fix = "is no accelerator", "write local for those of this machine, or a name such as 8xA100-80GB"
    elif devices:
        rule, fix = "matches several accelerators", f"write one of {', '.join(devices)}"
    else:
        rule = "is not in the catalog of accelerators"
        fix = f"nearest: {', '.join(list(dict.fromkeys(near))[:3])}" if near else f"known: {', '.join(gpu_catalog())}"
        fix += "; or describe the hardware in a YAML file"
    raise UsageError(ConfigError(where=where, value=name, rule=rule, fix=fix))


@lru_cache(maxsize=1)
def _names() -> Mapping[str, str]:
    """Return every key that means a catalog entry."""
    names: dict[str, str] = {}
    for gpu, entry in gpu_catalog().items():
        for name in (gpu, *entry.get("aliases", ())):
            names[_key(name)] = gpu
            if not _MEMORY.search(name):
                names.setdefault(_key(f"{name}-{entry['memory_gib']}GB"), gpu)
    return names


_MEMORY = re.compile(r"(?<![A-Z0-9.])(\d{1,4}) ?G(?:I?B)?(?![A-Z0-9])|(?<=\d)GI?B$", re.ASCII | re.IGNORECASE)
"""Memory as a word of its own (`A100-80G`, but not `A10G`), or its unit at the end of a name (`A10080GB`)."""
_VENDORS = re.compile(r"^(NVIDIA|GEFORCE|AMD|INSTINCT|INTEL|HABANA|TESLA)+")
_FORM_FACTOR = re.compile(r"(SXM|HBM)\d?E?")


def _key(name: str) -> str:
    """Return what two names of one device have in common.

    >>> _key("NVIDIA A100-SXM4-80GB"), _key("a100_80g"), _key("A10G"), _key("GeForce 4090")
    ('A10080', 'A10080', 'A10G', 'RTX4090')
    """
    upper = name.upper()
    memory = "".join(match[1] or "" for match in _MEMORY.finditer(upper))
    words = re.split(r"[^A-Z0-9]+", _MEMORY.sub(" ", upper))
    key = _VENDORS.sub("", "".join(word for word in words if not _FORM_FACTOR.fullmatch(word)))
    return ("RTX" if re.match(r"\d{4}(?!\d)", key) else "") + key + memory


_OTHER_FORMS = (
    re.compile(r"(?P<gpus>\d{1,5})[ *×-]?(?P<gpu>[A-Za-z].*)"),
    re.compile(r"(?P<gpu>[A-Za-z].*?)[ :*×x](?P<gpus>\d{1,5})"),
    re.compile(r"(?P<gpu>\d{4}.*)"),
)
"""`8 A100-80GB`, `A100-80GB:8` and `4090`."""


def _rewritten(text: str) -> str:
    """Return the fix of a name in another tool's form; empty if it is none.

    >>> _rewritten("a100-80gb:8"), _rewritten("8*H100"), _rewritten("4090"), _rewritten("8")
    ('write 8xA100-80GB', 'write 8xH100-80GB', 'write 1xRTX4090', '')
    """
    for form in _OTHER_FORMS:
        if match := form.fullmatch(text.strip()):
            with suppress(UsageError):
                return f"write {int(match.groupdict().get('gpus') or 1)}x{find_gpu(match['gpu'])}"
    return ""


_ANY_ACCELERATOR = frozenset({"AUTO", "CUDA", "GPU", "GPUS"})


def parse_hardware(text: str, *, host_memory: str | None = None, nvme: str | None = None) -> HardwareSpec:
    """Return the cluster for a name: `[[NODESx]GPUSx]GPU`, with or without spaces.

    `host_memory` is the memory of one node (`1TB`), `nvme` its NVMe as `PATH:SIZE` (`/local_nvme:3.5TB`).

    Raises:
        UsageError: The name, a count or a size is invalid; all errors together.

    >>> parse_hardware("4x8xH100-80GB").world_size
    32
    """
    match = _NAME.fullmatch(text.strip())
    if match is None or (match["gpu"][0].isdigit() and match["gpus"] is None):
        rule, fix = "must have the form [[NODESx]GPUSx]GPU", _rewritten(text) or "for example 8xA100-80GB"
        if "+" in text:
            rule, fix = "must be equal nodes", "describe the slowest node in a YAML file, with the number of all nodes"
        raise UsageError(ConfigError(where="hardware", value=text, rule=rule, fix=fix))
    nodes, gpus = int(match["nodes"] or 1), int(match["gpus"] or 1)
    errors = _count_errors(nodes=nodes, gpus_per_node=gpus)
    with collecting(errors):
        gpu = find_gpu(match["gpu"])
    with collecting(errors):
        overrides = parse_overrides(host_memory=host_memory, nvme=nvme)
    if errors:
        raise UsageError(errors)
    return _from_catalog(text.strip(), nodes, gpus, gpu, overrides)


def parse_overrides(*, host_memory: str | None = None, nvme: str | None = None) -> dict[str, Any]:
    """Return the hardware fields that `host_memory` (`1TB`) and `nvme` (`/local_nvme:3.5TB`) set.

    Raises:
        UsageError: One of them is invalid; both errors together.
    """
    values: dict[str, Any] = {}
    texts = {"host_memory": (host_memory, "1TB"), "nvme": (nvme, "/local_nvme:3.5TB")}
    errors = [
        ConfigError(where=name, value=value, rule="must be text", fix=f"for example {example}")
        for name, (value, example) in texts.items()
        if not isinstance(value, str | None)
    ]
    if errors:
        raise UsageError(errors)
    if host_memory is not None:
        values["host_bytes_per_node"] = _positive_bytes(host_memory, "host_memory", errors)
    if nvme is not None:
        path, _, size = nvme.rpartition(":")
        if path.startswith("/"):
            values |= {"nvme_path": path, "nvme_bytes_per_node": _positive_bytes(size, "nvme", errors)}
        else:
            rule, fix = "must have the form PATH:SIZE with an absolute path", "for example /local_nvme:3.5TB"
            errors.append(ConfigError(where="nvme", value=nvme, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    return values


def _positive_bytes(text: str, where: str, errors: list[ConfigError]) -> int:
    if re.fullmatch(r"[\d. ]+", text):
        errors.append(ConfigError(where=where, value=text, rule="has no unit", fix=f"write {text.strip()}GB"))
        return 0
    try:
        count = parse_bytes(text, where=where)
    except UsageError as error:
        errors += error.errors
        return 0
    if count < 1:
        errors.append(ConfigError(where=where, value=text, rule="must be at least one byte", fix="for example 1TB"))
    return count


def _count_errors(**counts: object) -> list[ConfigError]:
    return [
        ConfigError(where=f"hardware {field}", value=value, rule=f"must be an integer from 1 to {_LARGEST_COUNT:,}")
        for field, value in counts.items()
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_COUNT
    ]


def _from_catalog(name: str, nodes: int, gpus: int, gpu: str, overrides: Mapping[str, Any]) -> HardwareSpec:
    entry = gpu_catalog()[gpu]
    values: dict[str, Any] = {
        "gpu_bytes": int(entry["usable_gib"] * _GIB),
        "flops_per_s": entry["bf16_flops"],
        "memory_bytes_per_s": entry["memory_bytes_per_s"],
        "link_bytes_per_s": entry["link_bytes_per_s"],
        "network_bytes_per_s": entry["network_bytes_per_s"],
        "host_bytes_per_node": entry["host_gib_per_gpu"] * gpus * _GIB,
        "supports_bf16": entry.get("bf16", True),
        "source": entry["source"],
    }
    assumable = ["host_bytes_per_node"] + (["network_bytes_per_s"] if nodes > 1 else [])
    assumed = tuple(field for field in assumable if field not in overrides)
    return HardwareSpec(
        name=name, nodes=nodes, gpus_per_node=gpus, gpu=gpu, assumed=assumed, **(values | dict(overrides))
    )


def hardware_from_mapping(data: object, *, name: str) -> HardwareSpec:
    """Return the cluster for a mapping (a parsed YAML file).

    `gpu` names a catalog entry, whose numbers the other keys override. It can be any name if all of `gpu_bytes`,
    `flops_per_s`, `memory_bytes_per_s`, `link_bytes_per_s`, `network_bytes_per_s` and `host_bytes_per_node` are
    set. Sizes are numbers, or strings with a unit.

    Raises:
        UsageError: The data is not a mapping, or has unknown keys, missing keys or invalid values; all errors together.
    """
    if not isinstance(data, dict):
        rule, fix = "must be a mapping of hardware fields", "for example gpu: H100-80GB"
        raise UsageError(ConfigError(where=name, value=type(data).__name__, rule=rule, fix=fix))
    known = {field.name for field in fields(HardwareSpec)} - {"assumed"}
    errors = []
    for key in data:
        if key not in known:
            near = get_close_matches(str(key), sorted(known), n=1, cutoff=0.4)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            errors.append(ConfigError(where=f"{name}: {key}", rule="is not a hardware field", fix=fix))
    values = {key: value for key, value in data.items() if key in known and value is not None}
    nodes, gpus = values.pop("nodes", 1), values.pop("gpus_per_node", 1)
    errors += _count_errors(nodes=nodes, gpus_per_node=gpus)
    for key, value in values.items():
        # YAML 1.1 keeps a number with an exponent but no decimal point as text.
        where = f"{name}: {key}"
        if "bytes" in key or "flops" in key:
            if isinstance(value, str):
                try:
                    if _EXPONENT.fullmatch(value.strip()):
                        value = float(value)
                    else:
                        value = parse_bytes(value.strip().removesuffix("/s"), where=where)
                except UsageError as error:
                    errors += error.errors
                    continue
            smallest = 0 if key == "nvme_bytes_per_node" else 1
            if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value < 1e21:
                errors.append(ConfigError(where=where, value=value, rule="must be a positive number below 1e21"))
                continue
            values[key] = float(value) if key.endswith("_per_s") else int(value)
        elif key == "supports_bf16":
            if not isinstance(value, bool):
                errors.append(ConfigError(where=where, value=value, rule="must be true or false", fix="write true"))
        elif not isinstance(value, str) or not value.isprintable():
            errors.append(ConfigError(where=where, value=value, rule="must be one line of text", fix="quote it"))
    if ("nvme_path" in values) != bool(values.get("nvme_bytes_per_node")):
        rule, fix = "requires nvme_bytes_per_node, and vice versa", "set both or neither"
        errors.append(ConfigError(where=f"{name}: nvme_path", rule=rule, fix=fix))
    label, gpu = values.pop("name", name), values.pop("gpu", None)
    required = {field for field in known if field.endswith(("_bytes", "_per_s", "_per_node"))}
    optional = {field.name for field in fields(HardwareSpec) if field.default is None} | {"nvme_bytes_per_node"}
    complete = required - optional - {"gpus_per_node"} <= values.keys()
    if gpu is None and not complete:
        fix = "name an accelerator of the catalog, or set all sizes"
        errors.append(ConfigError(where=f"{name}: gpu", rule="is missing", fix=fix))
    elif isinstance(gpu, str) and not complete:
        with collecting(errors):
            gpu = find_gpu(gpu, where=f"{name}: gpu")
    if errors:
        raise UsageError(errors)
    if complete:
        return HardwareSpec(name=label, nodes=nodes, gpus_per_node=gpus, gpu=gpu or "custom", **values)
    return _from_catalog(label, nodes, gpus, str(gpu), values)


def with_gpus(hardware: HardwareSpec, *, nodes: int, gpus_per_node: int) -> HardwareSpec:
    """Return the cluster with other numbers of nodes and GPUs; host memory and NVMe stay the same per node."""
    values = asdict(hardware)
    prefix = f"{nodes}x{gpus_per_node}x" if nodes > 1 else f"{gpus_per_node}x"
    values |= {"name": prefix + hardware.gpu, "nodes": nodes, "gpus_per_node": gpus_per_node}
    if "host_bytes_per_node" in hardware.assumed:
        values["host_bytes_per_node"] = hardware.host_bytes_per_node // hardware.gpus_per_node * gpus_per_node
    return HardwareSpec(**values)
