"""Settings as people state them: each option is declared once, and reads the same text from every source.

A flag, a variable and a file hold text; so do a list's items. Fields turn it into values, and `faults_of` says in our
words what pydantic refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from .errors import Fault, UsageError
from .job import OffloadName, Recomputation, StrategyName
from .teacher_placement import TeacherPlacementChoice
from .yaml_file import yaml_value

Kind = TypeVar("Kind", bound="Settings")
NonFiniteAction = Literal["stop", "skip"]
"""What a loss or gradient that is not finite does to a training."""
NONFINITE_STEPS, HANG_SECONDS = 3, 1800.0
_NULL = "null"
_COMMA = re.compile(r",(?![^(){}\[\]]*[)}\]])")
"""A comma that separates names: not one inside of the brackets of a pattern."""

_SHORT_NUMBER = re.compile(r"-?[1-9]?[0-9]{1,18}(\.[0-9]{1,18})?")


_COMPILED = "decides itself which operators it fuses and what it recomputes"
_FLOAT8 = "keeps scaled copies and the ranges of its inputs, and runs its products at another speed"
NOT_COVERED: Mapping[str, str] = {
    "torch_compile": f"not covered: torch.compile {_COMPILED}; plans count memory and time of eager PyTorch, in "
    "bf16, fp16 or fp32",
    "float8": f"not covered: training in float8 {_FLOAT8}; plans count bf16, fp16 and fp32",
    "torchtitan": f"not covered: its stack compiles every layer, which {_COMPILED}, and its float8 {_FLOAT8}; plans "
    "count the Trainer's eager FSDP2",
}
"""Ways to train whose memory and time no plan predicts, with why not."""
_OTHER_NAMES = {
    "compile": "torch_compile",
    "fp8": "float8",
    "enable_float8": "float8",
    "dynamo_backend": "torch_compile",
}


def not_covered(name: object) -> str:
    """Return why no prediction covers a way to train, by any of its names; empty for everything else.

    >>> not_covered("fp8")[:11]
    'not covered'
    """
    plain = str(name).lower().lstrip("-").replace("-", "_").replace(".", "_")
    return NOT_COVERED.get(_OTHER_NAMES.get(plain, plain), "")


class Settings(BaseModel):
    """Options of a command, with their defaults, choices and descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
    group: ClassVar[str] = "Options"
    """The heading in `--help` under which options stand that this class declares."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, stated: Any) -> Any:
        if not isinstance(stated, dict):
            return stated
        return {name: None if value == _NULL else value for name, value in stated.items()}

    def stated_by(self, origins: Mapping[str, str]) -> Self:
        """Remember `flag`, `environment` or `file` by option, and return the settings."""
        self._origins.update({name: origin for name, origin in origins.items() if name in type(self).model_fields})
        return self

    def stated(self) -> dict[str, Any]:
        """Return the options that some source stated, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def origins(self) -> dict[str, str]:
        """Return where each value comes from; what no source stated is a `default`."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    @classmethod
    def groups(cls) -> dict[str, str]:
        """Return the heading of each option: that of the class which declares it first."""
        owners = [kind for kind in reversed(cls.__mro__) if issubclass(kind, Settings)]
        return {name: next(kind.group for kind in owners if name in kind.model_fields) for name in cls.model_fields}


def _items(value: object, split: Callable[[str], Iterable[str]]) -> object:
    """Return what a text or a list of texts names: `a,b`, `[a, b]` and a list are the same."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value)
    elif isinstance(value, str):
        return tuple(split(value))
    if not isinstance(value, list | tuple):
        return value
    found: list[object] = []
    for item in value:
        one = _items(item, split) if isinstance(item, str | list | tuple) else item
        found += one if isinstance(one, tuple) else [one]
    return tuple(found)


def parsed(text: str) -> Any:
    """Return what YAML reads in a text.

    Raises:
        ValueError: it is no YAML, holds tags, states a key twice, or a number that is not finite.
    """
    try:
        return yaml_value(text)
    except ValueError as error:
        raise ValueError(f"is not valid YAML ({getattr(error.__cause__, 'problem', None) or error})") from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in _COMMA.split(text) if word.strip()]


def _joined(value: object) -> object:
    found = _items(value, _words)
    return ",".join(map(str, found)) if isinstance(found, tuple) else found


def _named_values(value: object) -> object:
    """Return `NAME=VALUE` texts, or a mapping, as a mapping; values are what YAML reads."""
    if isinstance(value, dict):
        return {str(name).replace("-", "_"): item for name, item in value.items()}
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.find("=") > 0 for word in words):
        raise ValueError("must be NAME=VALUE")
    pairs = (word.partition("=") for word in words)
    return {name.strip().replace("-", "_"): parsed(text) if text else text for name, _, text in pairs}


Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Names, separated by commas or as a list."""
Numbers = Annotated[tuple[int, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Whole numbers, likewise."""
Decimals = Annotated[tuple[float, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Numbers, likewise."""
Size = int | Literal["auto"]
"""Ranks of an axis."""
Paths = Annotated[tuple[Path, ...], BeforeValidator(lambda value: _items(value, lambda text: [text]))]
"""Paths; as they may hold commas, several are a list, or a flag that is repeated."""
JoinedNames = Annotated[str, BeforeValidator(_joined)]
"""Names as one text, separated by commas."""
NamedValues = Annotated[dict[str, Any], BeforeValidator(_named_values)]
"""Values by name."""


class HardwareSettings(Settings):
    """Options that say what a run has."""

    group = "Hardware"

    hardware: str | None = Field(
        None,
        description="[[NODESx]GPUSx]GPU such as 8xA100-80GB or 4x8xH100-80GB, unequal nodes joined by +, a YAML file, "
        "or local",
    )
    host_memory: str | None = Field(None, description="Memory of one node, such as 1TB")
    nvme: str | None = Field(None, description="NVMe of one node as PATH:SIZE, such as /local_nvme:3.5TB")


class HubSettings(Settings):
    """Options that say where on the Hub a result goes."""

    group = "Hub"

    push_to_hub: str | None = Field(None, description="ORG/NAME of the Hub repository that gets the result, in the end")
    private: bool = Field(False, description="Make that repository private, where it is new")


class TrainingSettings(Settings):
    """Options that every planned training has."""

    group = "Training"

    micro_batch_size: int | Literal["auto"] = Field(
        "auto", description="Sequences of one forward pass on one rank, or auto"
    )
    global_batch_size: int | None = Field(None, ge=1, description="Sequences of one optimizer step over all ranks")
    optimizer: str = Field("adamw_torch_fused", description="A name of the Trainer's optim")
    lora_rank: int = Field(16, ge=1, description="Rank of the LoRA matrices")
    lora_targets: JoinedNames = Field("all-linear", description="Module names separated by commas, or all-linear")
    gradient_checkpointing: Recomputation = Field(
        "auto", description="Recompute each layer in the backward pass; selective keeps products and attention"
    )
    strategy: StrategyName = Field("auto", description="Engine and stage")
    offload: OffloadName = Field(
        "auto", description="Where optimizer states, and with cpu-all also parameters, may live"
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub model")


class GuardSettings(Settings):
    """Options of a running training: what ends one that should not go on."""

    group = "Guards"

    nonfinite: NonFiniteAction = Field("stop", description="What a loss or gradient that is NaN or Inf does")
    nonfinite_steps: int = Field(NONFINITE_STEPS, ge=1, description="Stop after so many such steps in a row")
    allow_nonfinite: bool = Field(False, description="Take and save weights that are NaN or Inf")
    hang_timeout: float = Field(
        HANG_SECONDS,
        ge=0,
        description="Seconds that a rank may stand still before all end; 0: as long as it wants",
    )

    @property
    def hang_seconds(self) -> float | None:
        """Seconds that a rank may stand still; `None` for as long as it wants."""
        return self.hang_timeout or None

    def guards(self) -> dict[str, Any]:
        """Return these options as arguments of `GuardCallback`."""
        shared = {name: getattr(self, name) for name in ("nonfinite", "nonfinite_steps", "allow_nonfinite")}
        return shared | {"hang_seconds": self.hang_seconds}

    def engine_faults(self, engine: str) -> list[Fault]:
        """Return the options that an engine cannot follow."""
        if self.nonfinite != "skip" or engine != "deepspeed":
            return []
        rule, fix = "DeepSpeed updates the weights inside the backward pass", "use stop, or --strategy ddp or fsdp2"
        return [Fault(where="nonfinite", value="skip", rule=rule, fix=fix)]


class TeacherPlacementSettings(Settings):
    """The option of a planned training that may have a teacher."""

    group = "Training"

    teacher_placement: TeacherPlacementChoice = Field(
        "auto", description="replica (whole on every rank), sharded, offloaded (host memory), quantized (4 bit), cached"
    )


class LayoutSettings(Settings):
    """Ranks that share a model, by axis."""

    group = "Parallel layout"

    tensor_parallel_size: Size = Field("auto", description="Ranks that share each layer (AutoTP), 1 for none, or auto")
    pipeline_parallel_size: Size = Field("auto", description="Pipeline stages, 1 for none, or auto")
    sequence_parallel_size: Size = Field(
        "auto", description="Ranks that share each sequence (Ulysses), 1 for none, or auto"
    )
    context_parallel_size: Size = Field(
        "auto", description="Ranks that share each sequence (torch context parallelism, FSDP2), 1 for none, or auto"
    )
    expert_parallel_size: Size = Field(
        "auto", description="Ranks that share the experts of each layer (AutoEP), 1 for none, or auto"
    )
    zero_quantized_weights: bool = Field(False, description="ZeRO++ qwZ: ZeRO-3 gathers weights in int8")
    zero_quantized_gradients: bool = Field(
        False, description="ZeRO++ qgZ: ZeRO-3 reduces gradients in int4 between nodes"
    )

    def layout(self) -> dict[str, Any]:
        """Return these options as fields of `TrainingJob`, in which `None` is left to the planner."""
        found = {name: getattr(self, name) for name in LayoutSettings.model_fields}
        return {name: None if value == "auto" else value for name, value in found.items()}


def adapter_faults(stated: Mapping[str, Any], method: str) -> list[Fault]:
    """Return the options of LoRA that are stated for a method without it."""
    rule, fix = "needs adapters", "add --method lora, or drop it"
    return [
        Fault(where=name, value=stated[name], rule=rule, fix=fix)
        for name in ("lora_rank", "lora_targets")
        if name in stated and method == "full"
    ]


def settings_of(kind: type[Kind], stated: Mapping[str, Any]) -> Kind:
    """Return settings of a kind from values by name.

    Raises:
        UsageError: unknown names and values that are not allowed, all together.
    """
    try:
        return kind.model_validate(dict(stated))
    except ValidationError as error:
        raise UsageError(faults_of(error, kind)) from None


def faults_of(error: ValidationError, kind: type[BaseModel]) -> list[Fault]:
    """Return one fault for each option that pydantic refused."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)
    return [_fault(name, found, kind) for name, found in details.items()]


def _fault(name: str, details: list[Any], kind: type[BaseModel]) -> Fault:
    first = details[0]
    if first["type"] == "extra_forbidden":
        return unknown_fault(name, kind.model_fields)
    if first["type"] == "missing":
        stated = first.get("ctx", {}).get("fix")
        return Fault(where=name, rule="is missing", fix=stated or f"give --{name.replace('_', '-')}")
    value = first["input"]
    if isinstance(value, str) and _SHORT_NUMBER.fullmatch(value):
        value = parsed(value)
    if value is None:
        return Fault(where=name, rule="must not be null", fix="leave it out to get its default")
    rules = dict.fromkeys(_rule(detail) for detail in details)
    field = kind.model_fields.get(name)
    choices = [] if field is None else _choices(field.annotation)
    near = get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    rule = " or ".join(rules).replace(" or must be ", " or ")
    if why := not_covered(value):
        return Fault(where=name, value=value, rule=rule, fix=why)
    return Fault(where=name, value=value, rule=rule, fix=f"did you mean {near[0]}?" if near else "")


def _rule(detail: Mapping[str, Any]) -> str:
    text = str(detail["msg"]).partition(", unable to")[0].removeprefix("Value error, ")
    return text.replace("Input should be", "must be").replace("a valid integer", "an integer")


def _choices(annotation: Any) -> list[str]:
    options = get_args(annotation)
    return [item for option in options for item in ([option] if isinstance(option, str) else _choices(option))]


def unknown_fault(name: str, known: Iterable[str], *, where: str | None = None) -> Fault:
    """Return that a name is no option, with the nearest one that is."""
    names = list(known)
    near = get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    fix = not_covered(name) or (f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}")
    return Fault(where=where or name, rule="is not a setting", fix=fix)
