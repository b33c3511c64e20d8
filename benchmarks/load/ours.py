"""Run bedplate's load generator for the comparison: one closed loop, with a JSON report."""

import argparse
import json

from bedplate.measure.load.generator import measure
from bedplate.measure.load.loops import run
from bedplate.measure.load.target import LoadTarget
from bedplate.values.run import Load
from bedplate.values.statistics import compute_quantile


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warmup", type=float, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    load = Load(
        concurrency=options.streams, prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens
    )  # fmt: skip
    repeat = run(
        measure(
            LoadTarget.from_url(options.url),
            load,
            seconds=options.seconds,
            warmup_s=options.warmup,
            least_requests=1,
            most_seconds=options.seconds,
            check=False,
        )
    )
    ttft = sorted(each.ttft_ms for each in repeat.samples if each.ttft_ms is not None)
    failed = sum(each.outcome != "ok" for each in repeat.samples)
    client = repeat.client
    report = {
        "ttft_ms": ttft,
        "p50_ms": compute_quantile(ttft, 0.5),
        "p99_ms": compute_quantile(ttft, 0.99),
        "failed": failed,
        "loop_lag_p99_ms": client.loop_lag_p99_ms,
        "send_lag_p99_ms": client.send_lag_p99_ms,
        "cpu_share": client.cpu_share,
        "limit": client.reasons,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
