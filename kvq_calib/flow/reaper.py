"""Mark flow runs as crashed whose process died without telling Prefect: kill -9, a lost machine, a full memory.

Whoever holds the lock of a run folder knows that no other process works there, since the lock ends with its process.
So every other flow run of that folder that Prefect still believes in is dead.
"""

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed

MESSAGE = "Its process ended without a word; another run has taken its folder over, and goes on where it stopped."


def mark_crashed(tag: str) -> list[UUID]:
    """Mark the flow runs with this tag that Prefect believes to be running, except the present one; their ids.

    A flow run that contained one of them died with it.
    """
    present = flow_run.get_id()
    running = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
        id=FlowRunFilterId(not_any_=[UUID(present)] if present else []),
    )
    dead = []
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=running):
            for id in [run.id, *_containing(client, run.parent_task_run_id)]:
                client.set_flow_run_state(id, Crashed(message=MESSAGE), force=True)
                dead.append(id)
    return dead


def _containing(client: SyncPrefectClient, parent: UUID | None) -> list[UUID]:
    """The flow runs that contain a subflow, inner ones first, as long as Prefect believes them to be running."""
    running = []
    while parent is not None:
        outer = client.read_task_run(parent).flow_run_id
        if outer is None:
            break
        outer_run = client.read_flow_run(outer)
        if outer_run.state is None or not outer_run.state.is_running():
            break
        running.append(outer)
        parent = outer_run.parent_task_run_id
    return running
