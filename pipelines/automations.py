"""Report failed and crashed runs, drift and 36 hours without success to a webhook; end runs whose process died.

Each is an automation of the Prefect server.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture

from pipelines.flows import DRIFTED

OURS = "kvq: "  # begins the name of each of them
RUNS: Any = {"prefect.resource.id": "prefect.flow-run.*"}
DEPLOYED: Any = {"prefect.resource.role": "deployment"}  # runs of deployments have one, and their subflows none
CALIBRATIONS: Any = {"prefect.resource.role": "flow", "prefect.resource.name": "kvq-calibrate"}
ENDS = "Failed", "Crashed", "TimedOut", DRIFTED  # names of states without success
FINAL = "Completed", "Failed", "Crashed", "Cancelled"
STARTED = "Scheduled", "AwaitingRetry", "Running", "Cancelling", *FINAL  # what ends Pending and its substates
SILENCE = timedelta(hours=36)
ONCE = timedelta(minutes=1)  # in which the server may evaluate an event again, if the database was busy
DEAD = timedelta(seconds=90)  # three heartbeats of 30 seconds
STRANDED = timedelta(minutes=15)  # on a busy machine a process takes minutes to start
STATE = '{"text": {{ ("kvq, " ~ flow.name ~ " " ~ flow_run.name ~ ": " ~ flow_run.state.message) | tojson }}}'
NO_SUCCESS = '{"text": {{ ("kvq: no calibration of " ~ flow_run.name ~ " has succeeded for 36 hours") | tojson }}}'


def define(webhook: str | None = None) -> None:
    """Define the automations on the server in use.

    webhook   where messages are posted, as JSON {"text": ...}; None: no messages, and only dead runs are ended
    """
    block = webhook and save_webhook(webhook)
    replace([*end_dead(), *([report_ends(block), report_silence(block)] if block else [])])


def report_ends(block: Any) -> AutomationCore:
    """Post the message of each run of a deployment that ends without success, once."""
    trigger = EventTrigger(
        expect=_events(*ENDS), match=RUNS, match_related=DEPLOYED, for_each={"prefect.resource.id"},
        posture=Posture.Reactive, threshold=1, within=ONCE,
    )  # fmt: skip
    call = CallWebhook(block_document_id=block, payload=STATE)
    return AutomationCore(name=f"{OURS}a run failed", trigger=trigger, actions=[call])


def report_silence(block: Any, within: timedelta = SILENCE) -> AutomationCore:
    """Post a message when no calibration of a model, once begun, has completed for this long."""
    trigger = EventTrigger(
        after=_events("Running", "Completed"), expect=_events("Completed"), match=RUNS, match_related=CALIBRATIONS,
        for_each={"prefect.resource.name"}, posture=Posture.Proactive, threshold=1, within=within,
    )  # fmt: skip  # a run has the name of its model
    call = CallWebhook(block_document_id=block, payload=NO_SUCCESS)
    return AutomationCore(name=f"{OURS}no success for 36 hours", trigger=trigger, actions=[call])


def end_dead(dead: timedelta = DEAD, stranded: timedelta = STRANDED) -> list[AutomationCore]:
    """End runs whose process died (kill -9, a lost machine), in whatever state, so that they block no other run."""
    died = "Its process died. A retry resumes."
    silent = f"No heartbeat for {dead.total_seconds():.0f} s. {died}"
    return [
        _end("find the dead", ["heartbeat"], ["*"], dead, StateType.CRASHED, silent),
        _end("find the stranded", ["Pending"], STARTED, stranded, StateType.CRASHED, f"Never started. {died}"),
        _end("end the cancelled", ["Cancelling"], FINAL, stranded, StateType.CANCELLED, "Its process died."),
    ]


def _end(
    name: str, after: Sequence[str], expect: Sequence[str], within: timedelta, state: StateType, message: str
) -> AutomationCore:
    """Give a run this state if, for this long `after` an event, none of the expected ones follows."""
    trigger = EventTrigger(
        after=_events(*after), expect=_events(*expect), match=RUNS, for_each={"prefect.resource.id"},
        posture=Posture.Proactive, threshold=1, within=within,
    )  # fmt: skip
    end = ChangeFlowRunState(name=None, state=state, message=message, force=False)
    return AutomationCore(name=OURS + name, trigger=trigger, actions=[end])


def _events(*states: str) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def save_webhook(url: str) -> Any:
    """Save the address as a block of the server; return the block's id."""
    block: Any = Webhook(url=url)  # type: ignore[arg-type]
    return block.save(name="kvq-webhook", overwrite=True)


def replace(automations: Sequence[AutomationCore]) -> None:
    """Make these the server's automations of kvq; those that it has already go on waiting."""
    with get_client(sync_client=True) as client:
        known = [old for old in client.read_automations() if old.name.startswith(OURS)]
        kept = [old.name for old in known if AutomationCore(**old.model_dump()) in automations]
        for old in known:
            if old.name not in kept:
                client.delete_automation(old.id)
        for automation in automations:
            if automation.name not in kept:
                client.create_automation(automation)
