"""`shardwright explain`: explain a written plan, one term, layout or rule, or the failure of a run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.check.failed_runs import FAILURES, find_causes
from ...ds_configs.check.flight_recorder import record_files, summary
from ...ds_configs.check.trl import MEANINGS
from ...ds_configs.legality.rules import RULES
from ...ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import KERNEL_MEANINGS, STRATEGY_MEANINGS
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.job import JobSettings
from ...ds_configs.specs.settings import choices_of
from ...ds_configs.specs.synonyms import removals, synonyms, texts_about
from ...ds_configs.specs.tasks import TASKS
from ...ds_configs.specs.terms import Place
from ...ds_configs.step_time.estimate import TERMS
from ..options import Output
from ..settings import FILLED, Options


class ExplainOptions(Output):
    # The hyphen of standard input is no flag.
    error: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = Field(
        None, description="Log of a failed run, or - for stdin; or records of its collectives"
    )


def explain_command(subject: str | None = None, *, options: Options[ExplainOptions] = FILLED) -> int:
    """Explain a written plan, or a word: an option, layout, memory term, rule or error; or why a run failed.

    Parameters
    ----------
    subject
        Directory or plan.json of a plan, or a word such as zero3, fsdp, bf16 or oom; `names` lists them. With --error,
        the plan of the run, for plans that need less memory.
    """
    if options.error is not None:
        return _explain_error(options.error, subject, as_json=options.as_json)
    if subject is None:
        rule, fix = "is missing", "pass the directory of a plan, a name of `shardwright explain names`, or --error LOG"
        raise UsageError(ConfigError(where="subject", rule=rule, fix=fix))
    name = subject.strip().lower().replace(" ", "_").replace("-", "_").replace(".", "_")
    meanings = explained_texts()
    names = texts_about(name, meanings)
    if not names and " " in subject:
        # Words of a sentence, such as zero3 vs fsdp, or out of memory.
        words = [word for word in synonyms() if "_" in word and f"_{word}_" in f"_{name}_"]
        words += subject.lower().replace("-", "_").split()
        names = list(dict.fromkeys(each for word in words for each in texts_about(word, meanings)))
    within = [each for each in meanings if f"_{name}_" in f"_{each}_"]
    exists = os.path.exists(subject)  # noqa: PTH110 - a name may be longer than a path
    if not exists and name == "names":
        print(json.dumps({"schema_version": 1, "names": sorted(meanings)}) if options.as_json else "\n".join(meanings))
        return 0
    if not exists and names:
        lines = [f"{each}: {meanings[each]}" for each in names]
        if options.as_json:
            meaning = meanings[name] if names == [name] else "\n".join(lines)
            print(json.dumps({"schema_version": 1, "name": name, "meaning": meaning}))
        else:
            from ..show import console

            more = [each for each in within if names != [name] and each not in names]
            console().print(*lines, *([f"see also: {', '.join(more)}"] if more else []), sep="\n", markup=False)
        return 0
    if not exists:
        is_path = "/" in subject or subject.endswith(".json")
        near = [] if is_path else [*within, *get_close_matches(name, [*meanings, *synonyms()], n=6, cutoff=0.5)]
        near = [each for each in dict.fromkeys(near) if texts_about(each, meanings)][:3]
        fix = f"did you mean {', '.join(near)}?" if near else "shardwright explain names lists all names"
        options_of_commands = {option.name for meant in synonyms().values() for option in meant}
        fix = fix if name in options_of_commands else removals().get(name, fix)
        rule = "no such file or directory" if is_path else "is not a path or a known name"
        raise UsageError(ConfigError(where="subject", value=subject, rule=rule, fix=fix))
    plan = Plan.load(subject)
    chosen = plan.chosen
    if options.as_json:
        of_place: dict[Place, dict[str, Any]] = {"accelerator": {}, "host": {}, "step": {}}
        for term in chosen.terms:
            value = {"bytes": term.bytes} if term.seconds is None else {"seconds": term.seconds}
            of_place[term.lives_on][term.name] = value | {"meaning": term.meaning}
        explained: dict[str, Any] = {
            "schema_version": 1,
            "model": plan.model.name,
            "layout": chosen.layout.label,
            "reason": chosen.reason,
            "phases": chosen.memory.gpu.phases,
            "terms": of_place["accelerator"],
            "host_terms": of_place["host"],
            "step_time": of_place["step"],
            "rejected": [{"layout": other.layout.label, "reason": other.reason} for other in plan.rejected],
        }
        if plan.learned_from:
            runs = [asdict(step) | {"ratio": step.ratio} for step in plan.learned_from]
            explained["learned"] = {"factor": chosen.time.learned_scale, "runs": runs}
        print(json.dumps(explained, indent=2))
        return 0
    from rich.text import Text

    from ...trainers.reports.report import Section
    from ...trainers.reports.runs import plan_report
    from ..show import console, print_rows

    out = console()
    place = f" for {plan.model.name} on {plan.hardware.name}"
    out.print(Text.assemble((display_name(chosen.layout), "bold"), place))
    report = plan_report(plan)
    for section in (Section("", tables=report.summary), *report.sections):
        out.print()
        if section.heading:
            out.print(Text(section.heading, style="bold"))
        for text in section.texts:
            out.print(text, markup=False)
        for table in section.tables:
            print_rows(out, table.headings, table.rows, title=table.caption)
    if plan.learned_from:
        from .calibrate import show_steps

        factor = f"{chosen.time.learned_scale:.2f} times the published prediction"
        out.print(f"{factor}, from the runs below. The published prediction counts as one run.")
        show_steps(plan.learned_from, title="Runs that corrected the step's time, seconds")
    return 0


SLOW_STEPS = (
    "The plan has the seconds of each term, and the report of a run the measured seconds beside them. If communication "
    "or offload dominates, use another layout. If GPUs wait between steps, raise dataloader_num_workers. If a report "
    "says that steps differ from the plan, compare links: nvidia-smi topo -m. Next: shardwright explain PLAN; "
    "shardwright report RUN; shardwright tune PLAN"
)


def explained_texts() -> dict[str, str]:
    """Return all texts by name: options, tasks, layouts, terms, rules, keys of TRL and errors of runs."""
    from ...trainers.training.settings import TrainSettings

    options = TrainSettings.model_fields | JobSettings.model_fields
    texts = {
        name: f"{field.description} (--{' '.join([name.replace('_', '-'), *choices_of(field.annotation)])})"
        for name, field in options.items()
    }
    texts |= {name: "; ".join([term.meaning, *texts.get(name, "").splitlines()]) for name, term in TERMS.items()}
    texts |= {name: task.meaning for name, task in TASKS.items() if name not in texts}
    texts |= {name.replace("-", "_"): meaning for name, meaning in STRATEGY_MEANINGS.items()}
    texts |= {rule.__name__: str(rule.__doc__).splitlines()[0] for rule in RULES}
    texts |= dict(KERNEL_MEANINGS) | dict(MEANINGS)
    texts["slow_steps"] = SLOW_STEPS
    # Texts with a placeholder need the line of a log.
    failures = (failure for failure in FAILURES if "{0}" not in failure.meaning)
    return texts | {each.name: " ".join((each.meaning, *each.fix, f"Next: {each.command}")) for each in failures}


def _explain_error(log: Path, plan: str | None, *, as_json: bool) -> int:
    """Print the cause of a failed run, and the next command."""
    loaded = None if plan is None else Plan.load(plan)
    if log.is_dir():
        # Records of collective operations, of all machines.
        if not record_files(log):
            rule, fix = "has no records of torch's flight recorder", "pass a log, or the directory of the records"
            raise UsageError(ConfigError(where="error", value=str(log), rule=rule, fix=fix))
        collectives = summary(log)
        if as_json:
            print(json.dumps({"schema_version": 1, "collectives": collectives}))
        else:
            print("\n".join(collectives) or "all ranks ended the same collective operations")
        return 0
    try:
        with sys.stdin.buffer if str(log) == "-" else log.open("rb") as stream:
            causes = find_causes(stream)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise UsageError(ConfigError(where="error", value=str(log), rule=rule, fix="pass the log of a run")) from None
    if not causes:
        raise ShardwrightError(
            f"{log}: no error of a run in it; pass the complete output of all ranks: COMMAND > LOG 2>&1"
        )
    cause, *others = causes
    failure = cause.failure
    fixes, command = [cause.filled(text) for text in failure.fix], cause.offered or cause.filled(failure.command)
    needs_less = ""
    if loaded is not None and failure.name in ("accelerator_out_of_memory", "host_out_of_memory", "killed"):
        is_host = failure.name != "accelerator_out_of_memory"
        phase = cause.groups[0] if cause.groups else "unknown"
        out_of_memory = OutOfMemory(phase=phase, error=cause.text, on_host=is_host)
        needs_less = out_of_memory_text(loaded, out_of_memory)
        command = next((line.strip() for line in needs_less.splitlines() if line.startswith("    shard")), command)
    if as_json:
        answer: dict[str, Any] = {
            "schema_version": 1,
            "cause": failure.name,
            "meaning": cause.filled(failure.meaning),
            "evidence": {"line": cause.line, "rank": cause.rank, "text": cause.text, "frame": cause.frame},
            "fix": fixes,
            "command": command,
            "others": [{"cause": other.failure.name, "line": other.line, "rank": other.rank} for other in others],
            "plans": needs_less,
        }
        print(json.dumps(answer, indent=2))
        return 0
    rank = "" if cause.rank is None else f", rank {cause.rank}"
    lines = [
        f"{failure.name.replace('_', ' ')}: {cause.filled(failure.meaning)}",
        f"  line {cause.line}{rank}: {cause.text[:300]}",
    ]
    lines += [f"  at {cause.frame}"] if cause.frame else []
    if others:
        followed = ", ".join(f"{other.failure.name.replace('_', ' ')} (line {other.line})" for other in others)
        lines.append(f"  other errors in the log: {followed}")
    lines += ["fix:", *(f"  {text}" for text in fixes), f"next: {command}"]
    print("\n".join([*lines, *([needs_less] if needs_less else [])]))
    return 0
