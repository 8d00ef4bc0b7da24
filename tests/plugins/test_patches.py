"""Registry of upstream patches: how it replaces attributes, that nothing else does, and that each entry is needed."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.metadata
import inspect
import io
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.ds_configs.specs.errors import ConfigError, UsageError
from shardwright.plugins import patches
from shardwright.plugins.patches import PATCHES, Patch, applied, apply, assign, remove, swap_class

ROOT = Path(__file__).parent.parent.parent
NAMESAKES = {"configuration.load_universal_checkpoint", "ctx.scale", "module.scale"}
"""Fields of other objects that are called as methods of DeepSpeed's engine are."""
PACKAGES = ("ds_configs", "plugins", "trainers", "cli")


# The mechanism, on an upstream package of its own.


class Base:
    def run(self, value: Any) -> Any:
        return [value]

    @classmethod
    def make(cls) -> Any:
        return [cls.__name__]


def entry(name: str, target: str, scope: Any = "process", **fields: Any) -> Patch:
    return Patch(scope, name, target, "", "", **fields)


ENTRIES = (
    entry("inner", "torch.fake_upstream:Child.run(self, value)"),
    entry("outer", "torch.fake_upstream:Child.run(self, value)"),
    entry("inner-make", "torch.fake_upstream:Child.make"),
    entry("outer-make", "torch.fake_upstream:Child.make"),
    entry("state", "torch.fake_upstream:state"),
    entry("table", "torch.fake_upstream:table"),
    entry("inner-hook", "torch.fake_upstream:Base.run", "instance"),
    entry("outer-hook", "torch.fake_upstream:Base.run", "instance"),
    entry("new-class", "torch.fake_upstream:Base", "instance"),
    entry("old-releases", "torch.fake_upstream:gone", versions="<0.1"),
)


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType("torch.fake_upstream")
    run = FunctionType(Base.run.__code__, globals(), "run")
    run.__module__ = "torch.fake_upstream"
    module.Base = type("Base", (Base,), {"run": run})
    module.Child = type("Child", (module.Base,), {})
    module.state, module.table = "stock", {"kept": 1}
    monkeypatch.setitem(sys.modules, "torch.fake_upstream", module)
    monkeypatch.setattr(patches, "PATCHES", ENTRIES)
    patches.target_error.cache_clear()
    yield module
    patches.target_error.cache_clear()


def adding(word: str) -> Callable[[Any], Any]:
    return lambda original: lambda *given: [*original(*given), word]


@pytest.mark.parametrize("order", [("inner", "outer"), ("outer", "inner")])
def test_entries_wrap_each_other_in_the_order_of_the_table(upstream: Any, order: tuple[str, str]) -> None:
    for name in order:
        apply(name, adding(name))
    assert upstream.Child().run(1) == [1, "inner", "outer"]
    own = upstream.Base()
    for name in order:
        apply(f"{name}-hook", adding(name), on=own)
    assert own.run(1) == [1, "inner", "outer"]
    assert upstream.Base().run(1) == [1]


def test_classmethods_stay_classmethods(upstream: Any) -> None:
    def wrapper(word: str) -> Callable[[Any], Any]:
        return lambda bound: classmethod(lambda cls: [*bound.__func__(cls), word])

    with applied("outer-make", wrapper("outer")), applied("inner-make", wrapper("inner")):
        assert upstream.Child.make() == ["Child", "inner", "outer"]
    assert "make" not in vars(upstream.Child)
    assert upstream.Child.make() == ["Child"]


@pytest.mark.parametrize("with_process_patch", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_contexts_restore_exactly(upstream: Any, with_process_patch: bool, raises: bool) -> None:
    if with_process_patch:
        apply("outer", adding("outer"))
    before = vars(upstream.Child).get("run")
    behind = ["outer"] if with_process_patch else []
    try:
        with applied("inner", adding("first")), applied("inner", adding("second")):
            assert upstream.Child().run(1) == [1, "first", "second", *behind]
            if raises:
                raise ValueError
    except ValueError:
        assert raises
    assert vars(upstream.Child).get("run") is before
    assert (before is None) == (not with_process_patch)


def test_items_of_mappings_are_replaced_and_restored(upstream: Any) -> None:
    table = upstream.table
    with applied("table", lambda value: value + 1, item="kept"), applied("table", lambda value: value, item="new"):
        assert table == {"kept": 2, "new": None}
    assert table == {"kept": 1}
    assert upstream.table is table


def test_an_object_keeps_no_trace_of_a_context(upstream: Any) -> None:
    own = upstream.Base()
    with applied("inner-hook", adding("inner"), on=own):
        assert own.run(1) == [1, "inner"]
    apply("outer-hook", adding("outer"), on=own)
    remove("outer-hook", on=own)
    assert vars(own) == {}
    own.run = users_own = lambda value: ["user", value]
    with applied("inner-hook", adding("inner"), on=own):
        assert own.run(1) == ["user", 1, "inner"]
    assert vars(own) == {"run": users_own}


def test_what_somebody_else_has_put_there_is_kept(upstream: Any) -> None:
    with applied("inner", adding("inner")):
        upstream.Child.run = others = lambda self, value: ["other", value]
    assert upstream.Child.run is others
    apply("outer", adding("outer"))
    assert upstream.Child().run(1) == ["other", 1, "outer"]
    remove("outer")
    assert upstream.Child.run is others


def test_state_that_upstream_writes_is_reset(upstream: Any) -> None:
    with applied("state", lambda _: None, resets=True):
        upstream.state = "written by upstream"
        with applied("state", lambda _: None, resets=True):
            assert upstream.state is None
        assert upstream.state == "written by upstream"
    assert upstream.state == "stock"


def test_a_copy_of_an_object_is_patched_and_restored_for_itself(upstream: Any) -> None:
    own = upstream.Base()
    apply("inner-hook", adding("inner"), on=own)
    copied = copy.deepcopy(own)
    remove("inner-hook", on=copied)
    assert copied.run(1) == [1]
    assert own.run(1) == [1, "inner"]


def test_an_object_with_a_patch_is_freed_with_its_last_reference(upstream: Any) -> None:
    own = upstream.Base()
    apply("inner-hook", lambda _: None, on=own)
    assign("outer-hook", None, on=own)
    swap_class("new-class", own, upstream.Child)
    # The value below the first is a method, which holds its object.
    remove("inner-hook", on=own)
    gone = weakref.ref(own)
    del own
    assert gone() is None


def test_releases_that_need_no_patch_stay_as_they_are(upstream: Any) -> None:
    apply("old-releases", adding("new"))
    assign("old-releases", 1)
    with applied("old-releases", adding("new")):
        assert not hasattr(upstream, "gone")
    assert errors_of_patches() == []


def test_a_different_release_is_an_error_with_the_release_to_install(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = (
        entry("absent-attribute", "torch.fake_upstream:Child.gone", every_run=True),
        entry("absent-module", "torch.no_such_module:attribute", every_run=True),
        entry("renamed", "torch.fake_upstream:Child.run(self, key)", every_run=True),
        entry("unread", "torch.fake_upstream:Child.unread", "instance", every_run=True),
    )
    monkeypatch.setattr(patches, "PATCHES", wrong)
    errors = {patch.name: str(config_error) for patch, config_error in zip(wrong, errors_of_patches(), strict=True)}
    tested = patches.tested_releases()["torch"]
    for patch in wrong:
        text = errors[patch.name]
        assert patch.name in text
        assert importlib.metadata.version("torch") in text
        assert f"tested releases: {tested}" in text
        assert f"install a tested release: pip install 'torch>={tested.oldest},<={tested.newest}'" in text
        assert "\n" not in text
        with pytest.raises(UsageError, match=patch.name):
            apply(patch.name, adding("new"), on=upstream.Base() if patch.scope == "instance" else None)
    assert "whose parameters are (self, value) here, not (self, key)" in errors["renamed"]
    with pytest.raises(UsageError) as error:
        patches.check_patches(frozenset({"torch"}))
    assert all(text in str(error.value) for text in errors.values())
    patches.check_patches(frozenset({"deepspeed"}))


def errors_of_patches() -> list[ConfigError]:
    """Return which patches have a target that the installed packages lack or define otherwise."""
    present = [
        each for each in patches.PATCHES if patches.installed_version(each.package) is not None and patches.needed(each)
    ]
    return [error for each in present if (error := patches.target_error(each)) is not None]


# The table.


def test_names_are_unique() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_entry_names_a_test_and_a_reason(patch: Patch) -> None:
    file, _, function = patch.canary.partition("::")
    assert function in functions_of(file), patch.canary
    assert patch.reason.endswith(".")


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_entry_is_applied_in_its_scope(patch: Patch) -> None:
    scopes = {
        scope
        for name, is_prefix, scope in applications()
        if patch.name == name or (is_prefix and patch.name.startswith(name))
    }
    assert scopes == {patch.scope}


@cache
def applications() -> tuple[tuple[str, bool, str], ...]:
    """Return the calls of the registry in the package: a name or its beginning, which of both, and the scope."""
    found = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = ast.unparse(node.func).partition("patches.")
            if called[0] or called[2] not in ("apply", "applied", "assign", "swap_class", "names"):
                continue
            is_on_object = called[2] == "swap_class" or any(keyword.arg == "on" for keyword in node.keywords)
            scope = "context" if called[2] == "applied" else "instance" if is_on_object else "process"
            argument = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(argument, ast.Constant):
                is_prefix = argument is not node.args[0] or called[2] == "names"
                found.append((str(argument.value), is_prefix, scope))
    return tuple(found)


def test_the_installed_releases_have_every_target() -> None:
    if importlib.util.find_spec("llmcompressor") is not None:
        from shardwright.plugins.llm_compressor import import_upstream

        import_upstream()
    assert errors_of_patches() == []


def test_upstream_is_changed_by_the_registry_alone() -> None:
    from accelerate import Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from transformers import Trainer

    kinds: tuple[Any, ...] = (Trainer, Accelerator, DeepSpeedEngine, PipelineEngine)
    # Any class has an `__init__`.
    methods = {name for kind in kinds for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name))}
    methods -= {"__init__"}
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        if file != ROOT / "plugins" / "patches.py"
        for line, text in changes_of_upstream(ast.parse(file.read_text(encoding="utf-8")), methods)
        if text not in NAMESAKES
    ]
    assert found == []


def changes_of_upstream(tree: ast.Module, methods: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the assignments and deletions that change imported packages, methods of upstream objects, or classes."""
    imported = {name for node in ast.walk(tree) for name in upstream_names(node)}
    for node in ast.walk(tree):
        for target in changed(node):
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            is_upstream = isinstance(root, ast.Name) and root.id in imported
            is_method = (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id != "self"
                and target.attr in methods
            )
            is_class = isinstance(target, ast.Attribute) and target.attr == "__class__"
            if is_upstream or is_method or is_class:
                yield target.lineno, ast.unparse(target)


def upstream_names(node: ast.AST) -> list[str]:
    """Return what an import of another package binds; the standard library is none."""
    if isinstance(node, ast.Import):
        pairs = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        pairs = [(node.module or "", alias.asname or alias.name) for alias in node.names]
    else:
        return []
    return [bound for module, bound in pairs if module.partition(".")[0] not in sys.stdlib_module_names]


def changed(node: ast.AST) -> Iterator[ast.Attribute | ast.Subscript]:
    """Yield the attributes and items that a node assigns or deletes, by statement or by `setattr` and `delattr`."""
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
        yield ast.copy_location(ast.Attribute(node.args[0], str(name), ast.Store()), node)


# Extension points: upstream code reads the attribute that an entry replaces.

_FORWARD = ("torch.nn.modules.module", "self.forward")
READ = {
    "metered-loss": ("transformers.trainer", "self.compute_loss"),
    "metered-generation": ("trl.trainer.grpo_trainer", "self._generate"),
    "renewed-schedule": ("transformers.trainer", "deepspeed_init"),
    "prepared-model": ("transformers.trainer", "self.accelerator.prepare"),
    "kept-through-free-memory": ("transformers.trainer", "self.accelerator.free_memory"),
    "evaluated-labels": ("transformers.trainer", "self.accelerator.gather"),
    "gradient-norm-without-zero": ("deepspeed.runtime.engine", "self._take_model_step"),
    "script-callbacks": ("transformers.trainer", "DEFAULT_CALLBACKS"),
    "captured-attention": ("transformers.models.llama.modeling_llama", "ALL_ATTENTION_FUNCTIONS.get_interface"),
    **dict.fromkeys(
        ("pipeline-checkpointing", "offloaded-checkpoints"),
        ("transformers.modeling_layers", "self._gradient_checkpointing_func"),
    ),
    "metered-backward": ("transformers.trainer", "self.accelerator.backward"),
    "samples-of-a-group-once": ("accelerate.accelerator", "self.gather"),
    "expert-parallel-state-dict": ("transformers.trainer", "self.accelerator.get_state_dict"),
    "pipeline-data-loader": ("accelerate.accelerator", "self.prepare_data_loader"),
    "metered-instructions": ("deepspeed.runtime.pipe.engine", "self._INSTRUCTION_MAP"),
    "metered-stage-loss": ("deepspeed.runtime.pipe.engine", "self.module.loss_fn"),
    "metered-engine-step": ("accelerate.utils.deepspeed", "self.engine.step"),
    **{
        f"forgotten-{name}": ("deepspeed.utils.groups", name)
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
    },
    "forgotten-_TP_MODEL_INIT_ARGS": ("deepspeed.runtime.tensor_parallel.init_utils", "_TP_MODEL_INIT_ARGS"),
    **dict.fromkeys(("tiled-mlp", "tiled-loss", "replaced-forward", *patches.names("qat-")), _FORWARD),
    "no-network": ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
}
"""The module that reads the attribute, and how."""
OPTIONAL_PACKAGES = {"llmcompressor": "llmcompressor", "trl": "trl"}


def reading_entries() -> list[Any]:
    own = [patch for patch in PATCHES if patch.canary.endswith("::test_upstream_reads_the_attribute")]
    optional = {
        patch.name: [pytest.mark.needs(OPTIONAL_PACKAGES[patch.package])]
        for patch in own
        if patch.package in OPTIONAL_PACKAGES
    }
    return [pytest.param(patch.name, marks=optional.get(patch.name, [])) for patch in own]


@pytest.mark.parametrize("name", reading_entries())
def test_upstream_reads_the_attribute(name: str) -> None:
    """Fails when a release calls something else, so that the replacement would do nothing."""
    module, *expressions = READ[name]
    assert set(expressions) <= expressions_of(module)


def test_upstream_calls_the_methods_of_the_exact_trainer() -> None:
    """Fails when a release calls another method, so that one of `ExactTrainer` would do nothing."""
    from shardwright.trainers.exact import ExactTrainer, StepEvents

    (entry_,) = (patch for patch in PATCHES if patch.name == "exact-trainer")
    parameters = {method.partition("(")[0] for method in entry_.methods}
    own = {name: method for name, method in vars(ExactTrainer).items() if inspect.isfunction(method)}
    upstream = {name: method for name, method in own.items() if not method.__qualname__.endswith(HELPERS)}
    assert parameters == upstream.keys()
    called = {f"self.{name}" for name in parameters - {"train"}}
    assert called <= expressions_of("transformers.trainer")
    files = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    events = {name: method for name, method in vars(StepEvents).items() if inspect.isfunction(method)}
    for name, method in (own | events).items():
        words = re.findall(r"Canary: `(\w+)`", method.__doc__ or "")
        assert all(f"def {word}(" in files for word in words), (name, words)


HELPERS = ("_restore", "_label_share", "_loss_of_user", "_gathering_losses", "_predicted")
"""Methods of `ExactTrainer` that the Trainer does not have."""


@cache
def expressions_of(module: str) -> frozenset[str]:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return frozenset(ast.unparse(node) for node in nodes if isinstance(node.ctx, ast.Load))


# Defects: each test does what upstream does without the patch, and fails once the patch can go.


def test_deepspeeds_optimizers_still_get_one_group() -> None:
    from transformers.integrations.deepspeed import deepspeed_init

    config = SimpleNamespace(config={"optimizer": {}, "scheduler": {}}, trainer_config_finalize=lambda *_: None)
    plugin = SimpleNamespace(hf_ds_config=config)
    trainer = SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        args=SimpleNamespace(get_process_log_level=lambda: 30),
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
    )
    optimizer, _ = deepspeed_init(trainer, 1)
    assert all(isinstance(weight, torch.Tensor) for weight in optimizer.params)


def test_no_callback_hears_of_an_exception(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, labels: Any) -> Any:
            raise RuntimeError("broken")

    heard = []

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            heard.append("begin")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            heard.append("end")

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    rows: Any = [{"labels": 0}]
    with pytest.raises(RuntimeError, match="broken"):
        Trainer(Broken(), arguments, train_dataset=rows, callbacks=[Ends()]).train()
    assert heard == ["begin"]


def test_transformers_rejects_a_device_map_for_any_model_under_zero3(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations import deepspeed
    from transformers.integrations.accelerate import check_and_set_device_map

    configuration = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", weakref.ref(configuration))
    with pytest.raises(ValueError, match=r"(?i)zero-?3"):
        check_and_set_device_map({"": "cpu"})
    with applied("zero3-while-loading", lambda _: None, resets=True):
        assert check_and_set_device_map({"": "cpu"}) == {"": "cpu"}
    assert deepspeed.is_deepspeed_zero3_enabled()


def test_deepspeed_clips_by_the_norm_of_one_stage_or_of_averaged_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import utils

    def clipped_by(others: float, ranks: int, mpu: Any = None) -> float:
        """The norm of this rank's gradient, which is 3, and of another rank."""
        collectives = SimpleNamespace(
            ReduceOp=torch.distributed.ReduceOp,
            get_world_size=lambda group: ranks,
            all_reduce=lambda total, group=None, op=None: total.add_(others if group is None else 0),
        )
        monkeypatch.setattr(utils, "dist", collectives)
        monkeypatch.setattr(utils.groups, "_get_data_parallel_group", lambda: None)
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([3.0])
        return float(utils.clip_grad_norm_([parameter], 1.0, mpu=mpu))

    second_stage = SimpleNamespace(get_model_parallel_rank=lambda: 1, get_model_parallel_group=lambda: "stages")
    assert clipped_by(0.0, 1, second_stage) == 0.0
    # The other rank has norm 4: together it is 5.
    assert clipped_by(4.0 / 2, 2) == 3.5


def test_deepspeed_fixes_the_shapes_of_attention() -> None:
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    kind = patches.upstream_value(next(patch for patch in PATCHES if patch.name == "ulysses-shapes"))
    assert kind.__module__ == ulysses_sp.__name__
    assert "assert query.shape == self.required_query_shape" in inspect.getsource(kind.forward)


def test_torch_waits_for_an_abandoned_lock(tmp_path: Path) -> None:
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "lock"
    lock.touch()
    stock = patches.upstream_value(next(patch for patch in PATCHES if patch.name == "abandoned-locks"))
    waiting = threading.Thread(target=stock, args=(FileBaton(str(lock), wait_seconds=0.01),), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    lock.unlink()
    waiting.join(10)
    assert not waiting.is_alive()


def test_ring_attention_names_no_operator_of_the_cpu() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    assert "_for_cpu" not in inspect.getsource(_attention)


def test_no_operator_sees_that_a_storage_is_resized() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(4)
    with Seeing():
        tensor.untyped_storage().resize_(0)
    assert seen == []


def test_zero3_replaces_linear_for_the_process() -> None:
    from deepspeed.runtime.zero import partition_parameters

    assert "torch.nn.functional.linear = zero3_linear_wrap" in inspect.getsource(partition_parameters)


@pytest.mark.needs("llmcompressor")
def test_bars_are_drawn_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm.std import tqdm

    # It is read when tqdm is imported.
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert not tqdm(total=1, file=io.StringIO()).disable
