"""Time to simulate a million requests on 512 GPUs with one core.

    python benchmarks/simulate/million.py [--requests 1000000] [--replicas 512] [--rate-each 10] [--router least-loaded]

Uses an 8B model in FP8 on H100s with the shipped estimates; the spread of lengths is half of their mean.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any, cast

from bedplate.decide import decide
from bedplate.decide.simulate import MeanLengths, compute_outcome, make_deployment, make_synthetic, simulate
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import look_up_model
from bedplate.values import LatencyTarget, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=512)
    parser.add_argument("--rate-each", type=float, default=10.0, help="requests per second and replica")
    parser.add_argument("--router", default="least-loaded", choices=("random", "least-loaded", "prefix"))
    parser.add_argument("--prefills", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--shared", type=int, default=0, help="tokens of a shared prefix; there are 1,000 prefixes")
    options = parser.parse_args()
    model = look_up_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model is not None
    work = Workload(
        concurrency=64,
        prompt_tokens=options.prompt,
        output_tokens=options.output,
        shared_prefix_tokens=options.shared,
        context_tokens=32768,
    )
    machine = make_simulated_hardware({"accelerator": "NVIDIA H100 SXM 80GB", "count": 1, "ram_gb": 512})
    lengths = MeanLengths(options.prompt, options.output)
    deployment = make_deployment(machine, model, decide(machine, model, work), work, lengths)
    rate = options.rate_each * options.replicas
    began = time.process_time()
    stream = make_synthetic(work, options.requests, rate, seed=1, spread=0.5, prefixes=1000)
    made = time.process_time()
    fleet = deployment.make_fleet(
        options.replicas, router=cast("Any", options.router), prefills=options.prefills, seed=1
    )
    ran = simulate(fleet, stream.make_book())
    simulated_at = time.process_time()
    found = compute_outcome(fleet, ran, deployment.cards, LatencyTarget(ttft_ms=500, tpot_ms=50), deployment.paid)
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.requests:,} requests on {options.replicas} replicas, {fleet.layout}, {options.router}: "
        f"{done - began:.1f} s of one core ({made - began:.1f} making requests, {simulated_at - made:.1f} simulating, "
        f"{done - simulated_at:.1f} counting), {peak:,.0f} MiB; on target {found.on_target:.1%}, "
        f"busy {found.busy_share:.0%}, {found.output_tok_s:,.0f} tok/s, TTFT p95 "
        f"{found.ttft_ms.p95 if found.ttft_ms else 0:.0f} ms"
    )


if __name__ == "__main__":
    main()
