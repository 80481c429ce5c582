"""`make bench`: run the benchmark and write bench/results.json, docs/performance.md and its plots."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from bench import cases, contenders, plots, report, runner
from bench.engine import ROOT
from bench.results import Results
from tokenwire_server.simulated_device.model_folder import write_model_folder

RESULTS = ROOT / "bench" / "results.json"
LOGS = ROOT / "bench" / "logs"


def main() -> int:
    """Run the command and return its exit code; 1 if a contender could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a short run of about two minutes, which does not update docs/"
    )
    parser.add_argument("--rounds", type=int, help="number of measurements per case and contender")
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="only regenerate docs/performance.md and its plots from bench/results.json",
    )
    options = parser.parse_args()
    # As for Ctrl-C, so that the processes of the run are terminated.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.report_only:
        results = msgspec.json.decode(RESULTS.read_bytes(), type=Results)
    else:
        plan = cases.quick_plan() if options.quick else cases.full_plan()
        if options.rounds is not None:
            plan = msgspec.structs.replace(plan, rounds=options.rounds)
        results = _measure(plan)
    print(report.terminal(results))
    if results.plan.quick:
        print("Quick run: docs/performance.md is not updated.")
    else:
        plots.write(results, ROOT / "docs" / "img")
        report.write(results, ROOT / "docs" / "performance.md")
    for name, failure in results.failures.items():
        sys.stderr.write(f"bench: {contenders.CONTENDERS[name].label} could not be measured: {failure}\n")
    return 1 if results.failures else 0


def _measure(plan: cases.Plan) -> Results:
    LOGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tokenwire-bench-") as folder:
        model = write_model_folder(Path(folder) / "model", vocab_size=cases.VOCABULARY, eos_token_id=cases.EOS)
        results = runner.run(plan, str(model), LOGS)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return results


if __name__ == "__main__":
    sys.exit(main())
