"""The one loader of causal language models: sound files, all tensors, finite numbers, no code, or a named fault.

Seen with transformers 5.17.0: `from_pretrained` initialises tensors that a checkpoint lacks at random and logs a table,
follows an index out of the directory, turns integers into weights, and loads NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...ds_configs.models.model_config import LARGEST_CONFIG_BYTES, code_faults, parse_config_json
from ...ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ..huggingface_hub.model_directory import model_directory
from ..launching.notes import note_on_first_rank
from ..safetensors.reading import StoredTensor, read_checkpoint
from .checkpoint_model import checkpoint_tensors
from .finite_weights import NONFINITE_FIX, nonfinite_weights, shortened
from .whole_loading import loads_on_first_rank

_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
_FETCH = "fetch it again, or save it again with save_pretrained"


def check_config(model: str) -> None:
    """Refuse the configuration of a local model where it is damaged, absurd or names code.

    Raises:
        UsageError: it cannot be read.
        RefusedInputError: a field of it breaks a rule; names all of them.
    """
    place = Path(model).expanduser()
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        return
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(Fault(where=str(file), rule=f"cannot be read ({error.strerror})")) from None
    refuse_code(parse_config_json(content, source=str(file)), str(file))


def refuse_code(config: Mapping[str, Any], source: str) -> None:
    """Refuse a configuration whose model would run a kernel of the Hub.

    Raises:
        RefusedInputError: names the fields.
    """
    if faults := code_faults(config, source):
        raise RefusedInputError(faults)


def check_weights(directory: Path, *, quantized: bool = False) -> None:
    """Refuse weight files that are damaged, missing, elsewhere, or of a type that weights do not have.

    Args:
        directory: A local checkpoint.
        quantized: Whether its configuration says how codes become weights.

    Raises:
        RefusedInputError: names file and tensor.
    """
    stored = read_checkpoint(directory)
    faults = [
        Fault(
            where=str(one.file), value=name, rule=f"is stored as {one.dtype}, without a quantization_config", fix=_FETCH
        )
        for name, one in stored.items()
        if not quantized and name.endswith((".weight", ".bias")) and one.dtype not in _NUMBERS
    ]
    if faults:
        raise RefusedInputError(faults[:3])


def stored_faults(stored: Mapping[str, StoredTensor], model: Any, where: str, *, base_prefix: str = "") -> list[Fault]:
    """Return what a checkpoint lacks, or has in another shape, that a model needs, from its headers alone.

    Args:
        stored: Tensors of the checkpoint by name.
        model: The model, which may be on the meta device; tied tensors count once.
        where: Name of the model in the faults.
        base_prefix: What names may leave out, such as `model.`.
    """
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    parameters = {name: one for name, one in model.named_parameters() if name not in tied}
    needed = checkpoint_tensors(model, parameters)
    found = {name: stored.get(name) or stored.get(name.removeprefix(base_prefix)) for name in needed}
    missing = [name for name, one in found.items() if one is None]
    other_shape = [name for name, one in found.items() if one is not None and one.shape != tuple(needed[name].shape)]
    return loading_faults({"missing_keys": missing, "mismatched_keys": other_shape}, where)


@contextmanager
def refused_by_name(name: str) -> Iterator[None]:
    """Let what Transformers refuses name the model, in one line.

    Raises:
        RefusedInputError: in place of its exceptions.
        ShardwrightError: the system lacks something, such as memory.
    """
    from safetensors import SafetensorError

    try:
        yield
    except ShardwrightError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        text = " ".join(str(error).split())
        # Memory that runs out and the like are no fault of the model.
        if isinstance(error, RuntimeError) and "mismatch" not in text:
            raise ShardwrightError(f"{name}: cannot be loaded ({type(error).__name__}: {text[:300]})") from error
        if "trust_remote_code" in text:
            fix = "name a model that Transformers knows; code that a repository ships is never run"
            raise RefusedInputError(Fault(where=name, rule="needs code of its own", fix=fix)) from None
        rule = f"cannot be loaded ({type(error).__name__}: {text[:300]})"
        raise RefusedInputError(Fault(where=name, rule=rule)) from None


def loading_faults(found: Mapping[str, Any], where: str) -> list[Fault]:
    """Return what `output_loading_info` tells of tensors that would be random."""
    # A name of another shape comes with both shapes.
    names = {key: sorted(one if isinstance(one, str) else one[0] for one in found.get(key) or ()) for key in found}
    return [
        Fault(where=where, value=names[key][:3], rule=f"{len(names[key])} tensors {rule}", fix=_FETCH)
        for key, rule in (
            ("missing_keys", "are not in the checkpoint, so that they would be random"),
            ("mismatched_keys", "have another shape in the checkpoint"),
        )
        if names.get(key)
    ]


def nonfinite_faults(model: Any, where: str) -> list[Fault]:
    """Return a fault that names weights which are NaN or infinite, on this rank."""
    names = nonfinite_weights(model)
    rule = f"holds NaN or infinity in {shortened(names)}"
    return [Fault(where=where, rule=rule, fix=NONFINITE_FIX)] if names else []


def load_causal_lm(name: str, *, allow_nonfinite: bool = False, **named: Any) -> Any:
    """Return a causal language model from a directory or the Hub, whose every weight was in the checkpoint.

    Args:
        name: Directory or Hub id.
        allow_nonfinite: Whether weights may be NaN or infinite.
        **named: Further arguments of `from_pretrained`.

    Raises:
        RefusedInputError: files are damaged or lie elsewhere, tensors are missing or of another shape or type, weights
            are not finite, or the configuration names code.
    """
    from transformers import AutoModelForCausalLM

    place = model_directory(name, revision=named.pop("revision", None))
    check_config(str(place))
    if place.is_dir():
        config = parse_config_json((place / "config.json").read_bytes(), source=name)
        check_weights(place, quantized=bool(config.get("quantization_config")))
    # The other ranks of a node get their weights later.
    later = loads_on_first_rank()
    with refused_by_name(name):
        model, found = AutoModelForCausalLM.from_pretrained(
            str(place),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Told by name below; the error of Transformers names none.
            ignore_mismatched_sizes=not later,
            **named,
        )
    faults = [] if later else loading_faults(found, name)
    if not allow_nonfinite and not later:
        faults += nonfinite_faults(model, name)
    if faults:
        raise RefusedInputError(faults)
    # Adapters name what they were trained on, which is no place in this machine's cache.
    model.name_or_path = model.config._name_or_path = name
    if unused := sorted(map(str, found.get("unexpected_keys") or ())):
        note_on_first_rank(
            f"{name}: {len(unused)} tensors of the checkpoint have no place in the model: {shortened(unused)}"
        )
    return model
