"""Share the chunks of a pass among other processes, with Ray: of this machine, or of a cluster. Only importer of ray.

Ray starts with the run and ends with it; where RAY_ADDRESS is set, the run goes to the cluster that is there. A worker
takes one chunk at a time, in the precision of the plan; it reads and writes the run folder, which all machines must
see under the same path, and keeps the layer it has read until the next pass. A chunk whose worker is killed is done
again by another one. Results come back in ascending order, no more than twice as many ahead as there are workers: the
process that started the run adds them up, alone.

Prefect's own Ray runner would make every chunk of every pass a task run, 100,000 of them in 80 layers, that a worker
reports to a server it must reach; a calibration needs no server. A layer is what Prefect sees, Ray works inside it.
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

for _name, _value in {  # read by ray, and by what it starts, when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what will be the default of ray, without its warning
    # patience: with five processes to a core, a start takes a third of the 30 s that ray would give it
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "60",  # times 3 s; who has died is known at once, without it
}.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.exceptions import RayError, RayTaskError  # noqa: E402

from kvq_calib.run.plan import FITS, environment, set_arithmetic  # noqa: E402
from kvq_calib.run.run import Executor, Run, Task  # noqa: E402
from kvq_runtime.disk import files  # noqa: E402

MARK = "workers"  # a file in the run folder, by which workers know that they see the same one


@dataclass(frozen=True)
class PassTask:
    """A pass as workers get it; `mark` is what they must find in the run folder."""

    run: Run
    mark: str
    task: Task
    shared: Any


@contextmanager
def ray_executor(run: Run, count: int) -> Iterator[Executor]:
    """An executor on `count` workers, which Ray starts here and stops at the end."""
    mark = uuid.uuid4().hex
    files.save(run.folder / MARK, mark.encode())
    cluster = "RAY_ADDRESS" in os.environ
    # local: else Ray joins any cluster that runs on this machine, or one that was killed, and so never signed off
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
    except RayTaskError:  # the task's own error: it is an instance of that error's class, too
        raise
    except RayError as error:
        raise RuntimeError(f"a chunk could not be done by any worker: {error}; the same command goes on") from error


_kept: dict[str, PassTask] = {}


def _do(sent: list[ray.ObjectRef], index: int) -> Any:
    """In a worker: one chunk. What is sent comes in a list, so that Ray hands over its name and it is read once."""
    name = sent[0].hex()
    if name not in _kept:
        _kept.clear()  # before the next is read: one layer at a time
        received = ray.get(sent[0])
        check_worker(received.run, received.mark)
        _kept[name] = received
    return _kept[name].task(_kept[name].shared, index)


def check_worker(run: Run, mark: str) -> None:
    """Check that this process works in the run's folder on a machine of its kind; set its precision to the plan's.

    RuntimeError: it does not.
    """
    path, plan = run.folder / MARK, run.plan
    if not path.is_file() or path.read_text() != mark:
        raise RuntimeError(f"a worker on another machine does not see {run.folder}; give --run a folder that all share")
    ours = environment(plan.device, plan.dtype, plan.threads) | {"fits": FITS}
    differ = sorted(name for name in {*ours, *plan.environment} if ours.get(name) != plan.environment.get(name))
    if differ:
        raise RuntimeError(f"a worker's {', '.join(differ)} differ from the run's; use machines of one kind")
    set_arithmetic(plan)
