"""How long a start takes, from nothing to ready: one engine alone, and a whole service with a Ray of its own.

Every figure is the median of fresh processes, Python's own start and all imports included, with the model's files in
the page cache. Phases are those that the start itself tells. Ray's part is measured beside it, in a process that does
what any program with a local Ray and as many actors does, and nothing else; the rest of a service's start is ours.

    python -m benchmarks.start --json
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Bar, arguments, publish
from pd_service.demo import demo_model_dir

AIM_S = 3.0
NUM_ENGINES = 2
STOP_TIMEOUT_S = 30.0
SERVE = ("-m", "pd_service.cli", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")

_ENGINE = """
import sys, time
from pathlib import Path
from pd_service.config import ServiceConfig
from pd_service.node.node import EngineNode
def tell(what):
    print(f"{time.time()} {what}", flush=True)
tell("imported")
node = EngineNode(ServiceConfig().engine_config("prefill", Path(sys.argv[1])), tell)
tell("ready")
"""

_RAY = """
import logging, os, sys, time
import ray
def tell(what):
    print(f"{time.time()} {what}", flush=True)
tell("imported")
ray.init(
    address="local", num_cpus=max(int(sys.argv[1]), os.cpu_count()), include_dashboard=False,
    object_store_memory=80 * 2**20, log_to_driver=False, logging_level=logging.ERROR,
)
tell("started")
class Idle:
    def pid(self):
        return os.getpid()
controller = ray.remote(Idle).options(num_cpus=0).remote()
ray.get(controller.pid.remote())
actors = [ray.remote(Idle).options(num_cpus=1).remote() for _ in range(int(sys.argv[1]))]
ray.get([actor.pid.remote() for actor in actors])
tell("ready")
ray.shutdown()
"""

Timeline = dict[str, float]  # what was told, and when first, in seconds since the process was started


def phases(lines: list[str], started_at: float) -> Timeline:
    """From lines "unix time, what"; a percentage at the end is no part of a phase."""
    told: Timeline = {}
    for line in lines:
        at, _, what = line.strip().partition(" ")
        told.setdefault(re.sub(r" *\d+%$", "", what), float(at) - started_at)
    return told


def time_program(program: str, argument: str) -> Timeline:
    started_at = time.time()
    command = [sys.executable, "-c", program, argument]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return phases(done.stdout.splitlines(), started_at)


def time_service() -> Timeline:
    """Stops the service as soon as it says that it is ready."""
    started_at, lines = time.time(), []
    with subprocess.Popen([sys.executable, *SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r" s  (\w+)(?:/\w+)?: (.*)", line):
                lines.append(f"{time.time()} {found[1]}: {found[2]}")
            if "is served" in line:
                lines.append(f"{time.time()} ready")
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=STOP_TIMEOUT_S)
    return phases(lines, started_at)


def median_timeline(timelines: list[Timeline]) -> Timeline:
    """Of what all of them told: short phases may go by unseen."""
    common = [what for what in timelines[0] if all(what in timeline for timeline in timelines)]
    return {what: statistics.median(timeline[what] for timeline in timelines) for what in common}


def bars(engine: Timeline, ray: Timeline, service: Timeline) -> list[Bar]:
    """The three sums against their aims, each behind the moments that lead to it."""
    made = []
    for name, timeline in (("engine", engine), ("Ray alone", ray), ("service", service)):
        moments = [item for item in timeline.items() if item[0] != "ready"]
        made += [_bar(f"{name}: {what}", at, note="begins at") for what, at in moments]
    own = service["ready"] - ray["ready"]
    return [
        *made,
        _bar("engine alone", engine["ready"], AIM_S, note="process start to ready, imports included"),
        _bar("Ray alone", ray["ready"], note=f"import, start, a controller and {NUM_ENGINES} idle actors"),
        _bar("service", service["ready"], note="exec to the line that says so"),
        _bar("service without Ray's part", own, AIM_S, note=f"{os.cpu_count()} cores for 2 engines and a gateway"),
    ]


def _bar(name: str, value_s: float, aim_s: float | None = None, *, note: str) -> Bar:
    return Bar(name=name, value=round(value_s, 3), aim=aim_s, better="lower", unit="s", note=note)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=3, help="fresh starts of each kind; medians are shown")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, given: {options.runs}")
    model_dir = demo_model_dir(lambda line: print(line, file=sys.stderr))
    time_program(_ENGINE, str(model_dir))  # files into the page cache, compiled modules onto the disk
    runs = range(options.runs)
    engine = median_timeline([time_program(_ENGINE, str(model_dir)) for _ in runs])
    ray = median_timeline([time_program(_RAY, str(NUM_ENGINES)) for _ in runs])
    service = median_timeline([time_service() for _ in runs])
    details = {"cpus": os.cpu_count(), "runs": options.runs, "model": Path(model_dir).name}
    found = bars(engine, ray, service)
    return publish("Start", found, as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
