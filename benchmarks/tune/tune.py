"""Measure the gain of tuning: engine defaults, bedplate's plan and the tuned settings on this machine.

    python benchmarks/tune/tune.py [--engines llama.cpp,vllm,pytorch] [--budget 10m] [--out FILE] [MODEL]

Installs missing engines first; that time is not counted. Prints a Markdown table, and below it the changed settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

from bedplate.cli.terminal import make_console
from bedplate.errors import BedplateError
from bedplate.show.tune import make_view
from bedplate.tuning.tune import tune
from bedplate.values.record import Figure
from bedplate.values.run import Load
from bedplate.values.tuning import ComparedSettings, TuningRun, describe_changes
from bedplate.values.units import format_figure, format_seconds, parse_duration

HEAD = "| engine | settings | weights | tok/s | TTFT ms | TPOT ms | peak GB | agreement | tok/s ratio | TTFT ratio |"
LINE = "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--engines", default="llama.cpp")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--build", choices=("packages", "native"), default="packages")
    parser.add_argument("--out", type=Path, help="write all measurements as JSON")
    options = parser.parse_args()
    load = Load(
        concurrency=options.concurrency,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    found: list[TuningRun] = []
    for engine in options.engines.split(","):
        teller = make_view(make_console(sys.stderr))
        with teller:
            try:
                found.append(
                    tune(
                        options.model, engine=engine, load=load,
                        budget_s=parse_duration(options.budget, "--budget", positive=True),
                        native=options.build == "native", progress=teller, teller=teller,
                    )
                )  # fmt: skip
            except BedplateError as error:
                print(f"{engine}: {error.message}: {error.cause}", file=sys.stderr)
        if options.out is not None:
            options.out.write_text(json.dumps(msgspec.to_builtins(found), indent=1), encoding="utf-8")
    print("\n".join(table(found)))


def table(found: list[TuningRun]) -> list[str]:
    lines = [HEAD, LINE]
    for tuned in found:
        lines += [row(tuned, side) for side in tuned.sides]
    lines.append("")
    for tuned in found:
        best = tuned.find_side("tuned")
        turned = describe_changes(best.turned) if best is not None else "nothing was better than the plan"
        lines.append(
            f"- {tuned.engine} {tuned.engine_version}: {turned}; {'proven' if tuned.is_proven else 'not proven'}, in "
            f"{format_seconds(tuned.spent_s)} with {tuned.measurements} short measurements. Bottleneck of the plan: "
            f"{tuned.limit or 'unknown'}."
        )
        lines += [f"  - {step.turn.knob} {step.turn.value}: {times(step.gain)}" for step in tuned.steps]
        lines += [f"  - {side.name}, by round: {turns(side)}" for side in tuned.sides]
        lines += [f"  - against {one.against}: {one.answer}. {one.text}" for one in tuned.proofs]
        lines += [f"  - refused: {describe_changes((one.turn,))}: {one.why}" for one in tuned.refused]
        lines += [f"  - {note}" for note in tuned.notes]
    return lines


def row(tuned: TuningRun, side: ComparedSettings) -> str:
    own = tuned.find_side("own defaults")
    proof = tuned.find_proof("own defaults") if side.name == "tuned" else None
    speed = first = ""
    if proof is not None and proof.output_tok_s is not None and proof.ttft_ms is not None:
        speed = times(proof.output_tok_s)
        first = f"{1 / proof.ttft_ms.value:.2f} ({1 / proof.ttft_ms.high:.2f} … {1 / proof.ttft_ms.low:.2f})"
    elif own is not None and own.output_tok_s and side.output_tok_s and own.ttft_ms and side.ttft_ms:
        speed = f"{side.output_tok_s.value / own.output_tok_s.value:.2f}"
        first = f"{side.ttft_ms.value / own.ttft_ms.value:.2f}"
    quality = side.quality
    answers = f"{round((quality.agreement or 0) * quality.asked)} of {quality.asked}" if quality is not None else ""
    peak = f"{side.peak_memory_bytes / 1e9:.3g}" if side.peak_memory_bytes else "TBD"
    cells = (
        f"{tuned.engine} {tuned.engine_version}" if side.name == "own defaults" else "", side.name, side.weights.label,
        spread(side.output_tok_s), spread(side.ttft_ms), spread(side.tpot_ms), peak, answers, speed, first,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def turns(side: ComparedSettings) -> str:
    return ", ".join(f"{one.output_tok_s or 0:.1f} tok/s and {one.ttft_ms or 0:.0f} ms" for one in side.taken)


def spread(found: Figure | None) -> str:
    return "TBD" if found is None else f"{format_figure(found.value)} ± {format_figure((found.high - found.low) / 2)}"


def times(gain: Figure) -> str:
    return f"× {gain.value:.2f} ({gain.low:.2f} … {gain.high:.2f})"


if __name__ == "__main__":
    main()
