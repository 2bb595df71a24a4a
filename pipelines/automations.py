"""Notify of a failed gate, of drift, and when no calibration has succeeded for 36 hours; find dead runs.

Each is an automation of the Prefect server, known by its name; defined again, it replaces the one before.
"""

from datetime import timedelta
from typing import Any

from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture

from kvq_calib.flow.flow import GATE_FAILED
from pipelines.flows import DRIFTED

RUNS = {"prefect.resource.id": "prefect.flow-run.*"}
SILENCE = timedelta(hours=36)
ONCE = timedelta(minutes=1)  # in which the server may evaluate an event again, when the database was busy
DEAD = timedelta(seconds=90)  # three heartbeats of 30 seconds
BLOCK = "kvq-webhook"
TOLD = '{"text": {{ ("kvq, " ~ flow.name ~ " " ~ flow_run.name ~ ": " ~ flow_run.state.message) | tojson }}}'
SILENT = '{"text": "kvq: no calibration has succeeded for 36 hours"}'


def define(webhook: str | None = None) -> list[str]:
    """Define the automations on the server in use; their names.

    webhook   where messages are posted, as JSON {"text": ...}; None: no messages, and only dead runs are found
    """
    made = [dead()]
    if webhook is not None:
        call = _webhook(webhook)
        made += [told("kvq: a gate failed", GATE_FAILED, call), told("kvq: drift", DRIFTED, call), silent(call)]
    for one in made:
        _replace(one)
    return [one.name for one in made]


def told(name: str, state: str, call: Any) -> AutomationCore:
    """Post the message of each run that enters a state, once."""
    trigger = EventTrigger(
        expect={f"prefect.flow-run.{state}"},
        match=RUNS,  # type: ignore[arg-type]
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=ONCE,
    )
    return AutomationCore(name=name, trigger=trigger, actions=[CallWebhook(block_document_id=call, payload=TOLD)])


def silent(call: Any, within: timedelta = SILENCE) -> AutomationCore:
    """Post a message when no calibration has completed for this long, and again after as long."""
    trigger = EventTrigger(
        expect={"prefect.flow-run.Completed"},
        match=RUNS,  # type: ignore[arg-type]
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": "kvq-calibrate"},  # type: ignore[arg-type]
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )
    payload = CallWebhook(block_document_id=call, payload=SILENT)
    return AutomationCore(name="kvq: no success for 36 hours", trigger=trigger, actions=[payload])


def dead(within: timedelta = DEAD) -> AutomationCore:
    """Mark a run that has stopped sending heartbeats as crashed: kill -9, a lost machine."""
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match=RUNS,  # type: ignore[arg-type]
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )
    message = "No heartbeat for 90 s: its process ended without a word. A retry goes on where it stopped."
    crashed = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    return AutomationCore(name="kvq: find the dead", trigger=trigger, actions=[crashed])


def _webhook(url: str) -> Any:
    block: Any = Webhook(url=url)  # type: ignore[arg-type]
    return block.save(name=BLOCK, overwrite=True)


def _replace(one: AutomationCore) -> None:
    with get_client(sync_client=True) as client:
        for old in client.read_automations_by_name(one.name):
            client.delete_automation(old.id)
        client.create_automation(one)
