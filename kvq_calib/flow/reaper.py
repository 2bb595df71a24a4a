"""Tell Prefect of runs that died without a word: kill -9, a lost machine, a full memory.

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


def bury(tag: str) -> list[UUID]:
    """Mark the flow runs with this tag that are thought to run, but for the present one, as crashed; their ids.

    A flow run that contained one of them died with it.
    """
    own = flow_run.get_id()
    running = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
        id=FlowRunFilterId(not_any_=[UUID(own)] if own else []),
    )
    dead = []
    with get_client(sync_client=True) as client:
        for found in client.read_flow_runs(flow_run_filter=running):
            for one in [found.id, *_around(client, found.parent_task_run_id)]:
                client.set_flow_run_state(one, Crashed(message=MESSAGE), force=True)
                dead.append(one)
    return dead


def _around(client: SyncPrefectClient, parent: UUID | None) -> list[UUID]:
    """The flow runs that contain a subflow, inner ones first, if they are thought to run."""
    found = []
    while parent is not None:
        outer = client.read_task_run(parent).flow_run_id
        if outer is None:
            break
        outer_run = client.read_flow_run(outer)
        if outer_run.state is None or not outer_run.state.is_running():
            break
        found.append(outer)
        parent = outer_run.parent_task_run_id
    return found
