"""Distribute the chunks of a pass to processes of this machine or a cluster, with Ray. Only importer of ray.

Ray starts and ends with the run; RAY_ADDRESS names a running cluster instead. A worker processes one chunk at a time,
in the precision of the plan. It reads and writes the run folder, which all machines must see under the same path, and
holds its layer until the next pass. Another worker repeats the chunk of a killed one. The process of the run alone adds
up results, in ascending order; at most twice as many chunks as workers are in flight.

A layer is a task of Prefect, and Ray works inside it: Prefect's own Ray runner would make every chunk a task run,
100,000 of them in 80 layers, each reported to a server.
"""

import logging
import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

for _name, _value in {  # read at import, by ray and its processes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # ray's future default, without its warning
    # patience: with five processes to a core, a start takes a third of the 30 s that ray would give it
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "60",  # times 3 s; deaths are noticed at once, without it
}.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.exceptions import RayError, RayTaskError  # noqa: E402

from kvq_calib.run.plan import FITS, environment, set_arithmetic  # noqa: E402
from kvq_calib.run.run import Executor, Run, Task  # noqa: E402
from kvq_runtime.disk import files  # noqa: E402

MARK = "workers"  # a file that proves that a worker sees the same run folder


@dataclass(frozen=True)
class PassTask:
    """A pass to send to workers; `mark` is the content of the run folder's MARK."""

    run: Run
    mark: str
    task: Task
    shared: Any


@contextmanager
def ray_executor(run: Run, count: int) -> Iterator[Executor]:
    """Start `count` workers, yield their executor, and stop them."""
    mark = uuid.uuid4().hex
    files.save(run.folder / MARK, mark.encode())
    cluster = "RAY_ADDRESS" in os.environ
    # local: else Ray joins any cluster of this machine, even a killed one
    address, cores = (None, None) if cluster else ("local", count)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # a warning that tokens are checked
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    ray.init(address, num_cpus=cores, include_dashboard=False, **quiet)
    gpus = int(run.plan.device.startswith("cuda"))
    remote = ray.remote(num_cpus=run.plan.threads if cluster else 1, num_gpus=gpus)(_do)

    def execute(task: Task, shared: Any, indices: Iterable[int]) -> Iterator[Any]:
        sent, todo, waiting = ray.put(PassTask(run, mark, task, shared)), iter(indices), deque()
        while True:
            waiting.extend(remote.remote([sent], index) for index in islice(todo, 2 * count - len(waiting)))
            if not waiting:
                return
            yield _result(waiting.popleft())

    try:
        yield execute
    finally:
        ray.shutdown()
        (run.folder / MARK).unlink(missing_ok=True)


def _result(waited: ray.ObjectRef) -> Any:
    try:
        return ray.get(waited)
    except RayTaskError:  # an instance of the task's own error, too
        raise
    except RayError as error:
        raise RuntimeError(f"a chunk could not be done by any worker: {error}; the same command goes on") from error


_current: dict[str, PassTask] = {}


def _do(sent: list[ray.ObjectRef], index: int) -> Any:
    """Process one chunk in a worker. In a list, Ray sends the reference: the pass is fetched once."""
    name = sent[0].hex()
    if name not in _current:
        _current.clear()  # before the fetch: one layer at a time
        received = ray.get(sent[0])
        check_worker(received.run, received.mark)
        _current[name] = received
    return _current[name].task(_current[name].shared, index)


def check_worker(run: Run, mark: str) -> None:
    """Set this process' precision to the plan's. Raises RuntimeError for another folder or kind of machine."""
    path, plan = run.folder / MARK, run.plan
    if not path.is_file() or path.read_text() != mark:
        raise RuntimeError(f"a worker on another machine does not see {run.folder}; give --run a folder that all share")
    ours = environment(plan.device, plan.dtype, plan.threads) | {"fits": FITS}
    differ = sorted(name for name in {*ours, *plan.environment} if ours.get(name) != plan.environment.get(name))
    if differ:
        raise RuntimeError(f"a worker's {', '.join(differ)} differ from the run's; use machines of one kind")
    set_arithmetic(plan)
